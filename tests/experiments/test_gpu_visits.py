"""The seven visits to a GPU in their dry form: whole commands, on tiny sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from experiments.gpu import cold, curve, kernels, loads
from experiments.gpu.learner import TINY
from experiments.gpu.visits import VISITS
from laminar_py.config.loading import load_config
from laminar_py.learner.attention import KERNELS, sdpa_per_sequence
from tests.engines.sglang.rig import sglang_python

ROOT = Path(__file__).parents[2]


def visit(number: int, out: Path, *options: str) -> dict[str, dict[str, float]]:
    """Figures of each piece that ran."""
    command = [sys.executable, "-m", "experiments.gpu.run", "--visit", str(number), "--dry", "--out", str(out)]
    ran = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    found = json.loads(out.read_text())
    assert ran.returncode == 0, [piece["log"] for piece in found["pieces"]]
    assert out.with_suffix(".md").read_text().startswith(f"# Visit {number}: {VISITS[number].title}\n")
    figures = {piece["name"]: {} for piece in found["pieces"] if piece["status"] == "done"}
    for row in found["rows"]:
        figures[row["piece"]][row["name"]] = row["value"]
    return figures


@pytest.mark.slow
def test_two_ranks_train_as_one_does(tmp_path):
    found = visit(1, tmp_path / "1.json")
    figures = found["dense"] | found["mixture_offload"]
    for case in ("dense", "mixture", "offload"):
        assert figures[f"{case}_fp32_holds"] == 1
        assert 0 <= figures[f"{case}_fp32_weights_difference"] < 1e-5
        assert figures[f"{case}_fp32_checkpoint_difference"] == figures[f"{case}_fp32_publish_difference"] == 0
    assert figures["gloo_reduce_scatter_tensor"] == 1


@pytest.mark.parametrize(("number", "count"), [(2, 2), (6, 3)])
def test_without_sglang_a_visit_that_needs_it_runs_nothing(tmp_path, number, count):
    assert visit(number, tmp_path / "result.json") == {}
    pieces = json.loads((tmp_path / "result.json").read_text())["pieces"]
    assert [piece["status"] for piece in pieces] == ["not run"] * count


@pytest.mark.slow
def test_each_way_to_load_is_timed(tmp_path):
    found = visit(3, tmp_path / "3.json")
    assert list(found) == ["files_3GB", "files_15GB"]
    ways = ("load_mapped", "load_read", "load_read_locked", "load_safetensors", "copy_locked")
    assert all(figures[way] > 0 for figures in found.values() for way in ways)


def test_each_way_to_load_brings_the_bytes_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(loads, "SHARD_BYTES", 100_000)
    monkeypatch.setattr(loads, "PIECE_BYTES", 7_001)
    files = loads.write_version(tmp_path / "version", TINY.model)
    assert len(files) > 1
    whole = torch.cat([torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files])
    for way in (loads.read, loads.read_locked):
        way(files, target := torch.zeros(len(whole), dtype=torch.uint8))
        assert torch.equal(target, whole)
    loads.mapped(files, target := torch.zeros(len(whole), dtype=torch.uint8))
    tensors = [tensor for file in files for tensor in load_file(file).values()]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    assert int(target[:num_bytes].sum()) == sum(int(tensor.view(torch.uint8).sum()) for tensor in tensors)


def test_kernels_are_compared_and_a_missing_one_is_named_once(tmp_path):
    found = visit(4, tmp_path / "4.json")
    assert list(found) == ["heads_28_4", "heads_64_8"]
    for figures in found.values():
        assert all(0 < value < 0.02 for name, value in figures.items() if value and name.endswith("_error"))
        missing = [name for name, value in figures.items() if value is None]
        assert len(missing) == len(KERNELS) - 1, "a CPU has SDPA alone"
        assert len(figures) == len(missing) + 4 * 3


def test_a_kernel_whose_gradient_is_wrong_shows(monkeypatch):
    def wrong(q, k, v, *rest):
        return sdpa_per_sequence(q, k * 1.0 + 0.2 * (k - k.detach()), v, *rest)

    name = next(iter(KERNELS))
    monkeypatch.setattr(kernels, "KERNELS", {name: wrong})
    values = {row.name: row.value for row in kernels.kernel_rows(4, 2, longest=32, device="cpu")}
    assert values[f"{name}_one_32_forward_error"] < 0.02
    assert values[f"{name}_one_32_gradient_error"] == pytest.approx(0.2, rel=0.1)


@pytest.mark.slow
def test_real_widths_have_a_formula_and_tiny_ones_a_speed(tmp_path):
    found = visit(5, tmp_path / "5.json")
    assert {piece: round(figures["memory_formula_selective"]) for piece, figures in found.items()} == {
        "width_7b_10_layers": 92,
        "width_32b_6_layers": 120,
        "width_30b_a3b_8_layers": 113,
    }
    assert all(figures["tokens_per_s_selective"] > 0 for figures in found.values())


@pytest.mark.slow
def test_the_curve_is_drawn_undisturbed_and_with_kills(tmp_path):
    found = visit(7, tmp_path / "7.json", "--budget-min", "60")
    assert list(found) == ["undisturbed", "killed"]
    for name, figures in found.items():
        assert figures[f"{name}_steps"] == 60
        assert figures[f"{name}_violations"] == 0
        assert {f"{name}_accuracy_step_0", f"{name}_accuracy_step_60"} <= set(figures)
    assert found["killed"]["kills"] == 3
    assert "killed_minus_undisturbed_accuracy_end" in found["killed"]


def test_the_settings_of_the_curve_are_a_config(tmp_path, monkeypatch):
    monkeypatch.setattr(curve, "call", lambda command: None)  # the model's package may be missing
    monkeypatch.setattr(curve, "interpreter", lambda python, work: python)
    task = curve.full_task(Path("sglang-env/bin/python"), tmp_path)
    config = load_config(task.config, [*task.settings, "name=curve"])
    assert (config.steps, config.learner.lora, config.data.prepare) == (200, None, None)
    assert config.rollout.engine.flags == {"mem-fraction-static": 0.25}
    assert config.eval.sets["heldout"].path == f"{tmp_path}/data/heldout.jsonl"


def test_trl_is_not_run_and_says_why():
    row = curve.trl_row()
    assert row.value is None
    assert row.conditions.startswith("not run: vllm not installed")


def test_no_compiler_is_left_on_the_path_and_other_programs_are(tmp_path, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("gcc-12", "nvcc", "cc", "sh"):
        (tools / name).touch()
    monkeypatch.setenv("PATH", f"{tools}:{tmp_path / 'absent'}")
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    environment, _ = cold.without_compilers(tmp_path)
    assert "CUDA_HOME" not in environment
    first, second = environment["PATH"].split(":")
    assert [path.name for path in Path(first).iterdir()] == ["sh"]
    assert second == str(tmp_path / "absent")


@pytest.mark.sglang
@pytest.mark.parametrize(("number", "pieces"), [(2, "cold"), (3, "sglang_3GB"), (6, "retract")])
def test_visits_with_a_server_run_on_a_cpu(tmp_path, number, pieces):
    options = ("--sglang", str(sglang_python()), "--only", pieces)
    [figures] = visit(number, tmp_path / "result.json", *options).values()
    wanted = {2: "warm_first_step", 3: "update_from_disk_without_mmap", 6: "retract_busy_tokens_per_s"}
    assert figures[wanted[number]] > 0
    assert figures.get("retract_violations", 0) == 0
