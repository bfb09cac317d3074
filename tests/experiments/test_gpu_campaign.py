"""Visits to a GPU, as far as they go without one: plans, budgets, JSON and page, wheels."""

import json
import os
import re
import select
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.gpu import learner, publish, run
from experiments.gpu.run import Campaign, Result, join_parts, lacking
from experiments.gpu.step_profile import kind_of
from experiments.gpu.steps import FULL
from experiments.gpu.strip import strip
from experiments.gpu.visits import (
    COMMAND_MIN,
    INSTALL_S,
    OLDER,
    TESTED,
    VISIT_MIN,
    VISITS,
    Figure,
    Piece,
    Visit,
    read_tests,
)

ROOT = Path(__file__).parents[2]
ROW = {"name": "a", "value": 1.5, "unit": "x", "conditions": "c"}
REPORT = json.dumps({"bench": "b", "machine": "m", "rows": [ROW]})


LIMIT_S = 300.0  # of a piece that a test waits for


def piece(name: str, code: str, *, limit_s: float = LIMIT_S) -> Piece:
    return Piece(name=name, arguments=("-c", code), limit_s=limit_s)


def result(visit: int = 1, *, dry: bool = False) -> Result:
    return Result(visit=visit, dry=dry, machine="here", gpus=[], versions={})


def campaign(out: Path, *, budget_s: float = 3600.0) -> Campaign:
    return Campaign(result(), out=out, budget_s=budget_s)


def statuses(out: Path) -> dict[str, str]:
    return {piece["name"]: piece["status"] for piece in json.loads(out.read_text())["pieces"]}


def impatient(said):
    """Processes whose time is over as soon as they open that pipe."""

    class Impatient(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout != LIMIT_S:
                return super().wait(timeout)
            with os.fdopen(os.open(said, os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
                poll = select.poll()
                poll.register(pipe, select.POLLIN | select.POLLHUP)
                assert poll.poll(60_000), "it never said that it hangs"
            raise subprocess.TimeoutExpired(self.args, timeout)

    return Impatient


def call(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.gpu.run", "--out", str(out), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("visit", VISITS, ids=lambda visit: visit.title)
def test_all_pieces_have_time_within_a_visit_and_each_within_a_command(visit):
    names = [piece.name for piece in visit.pieces]
    assert len(set(names)) == len(names)
    longest = 28 if visit is VISITS[0] else VISIT_MIN
    assert INSTALL_S + sum(piece.limit_s for piece in visit.pieces) <= 60 * longest
    assert INSTALL_S + max(piece.limit_s for piece in visit.pieces) <= 60 * COMMAND_MIN


def test_every_module_and_file_of_a_piece_is_there():
    for arguments in (piece.arguments for visit in VISITS for piece in visit.pieces):
        assert all((ROOT / path).exists() for path in arguments if path.startswith("tests/"))
        if arguments[1].startswith("experiments"):
            assert (ROOT / f"{arguments[1].replace('.', '/')}.py").is_file()


def test_a_piece_that_fails_or_runs_out_of_time_costs_itself_alone(tmp_path, monkeypatch):
    out, said = tmp_path / "result.json", tmp_path / "said"
    os.mkfifo(said)
    ours = campaign(out)
    ours.run(piece("fails", f"print('{REPORT}'); raise SystemExit('why it failed')"), ())
    hangs = f"print('{REPORT}', flush=True); open('{said}', 'w').close(); import signal; signal.pause()"
    with monkeypatch.context() as patched:
        patched.setattr(run.subprocess, "Popen", impatient(said))
        ours.run(piece("hangs", hangs), ())
    ours.run(piece("measures", f"print('noise'); print('{REPORT}')"), ())
    assert statuses(out) == {"fails": "failed", "hangs": "out of time", "measures": "done"}
    found = json.loads(out.read_text())
    assert found["rows"] == [{"piece": name, **ROW} for name in ("fails", "hangs", "measures")]
    assert "why it failed" in found["pieces"][0]["log"]


BROKEN = {
    "torn": REPORT.encode()[:30],
    "of_another_form": b'{"bench": 1}',
    "not_utf8": b'{"bench": "\xff',
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_costs_itself_and_its_piece_is_to_be_run_again(tmp_path, line):
    out = tmp_path / "result.json"
    ours = campaign(out)
    output = line + b"\n" + REPORT.encode()
    ours.run(piece("broken", f"import sys; sys.stdout.buffer.write({output})"), ())
    ours.run(piece("measures", f"print('{REPORT}')"), ())
    assert statuses(out) == {"broken": "failed", "measures": "done"}
    found = json.loads(out.read_text())
    assert found["rows"] == [{"piece": name, **ROW} for name in ("broken", "measures")]
    assert "1 broken lines among the reports" in found["pieces"][0]["log"]


def test_complaints_that_are_not_utf8_or_lie_between_reports_spoil_none(tmp_path):
    out = tmp_path / "result.json"
    first, second = REPORT[:20], REPORT[20:]
    code = f"import os; os.write(1, b'{first}'); os.write(2, bytes([255, 10])); os.write(1, b'{second}')"
    campaign(out).run(piece("measures", code), ())
    assert statuses(out) == {"measures": "done"}
    assert json.loads(out.read_text())["rows"] == [{"piece": "measures", **ROW}]


def test_what_the_budget_does_not_reach_is_not_begun(tmp_path):
    out = tmp_path / "result.json"
    campaign(out, budget_s=5.0).run(piece("late", f"print('{REPORT}')"), ())
    assert statuses(out) == {"late": "not begun"}


def test_another_call_goes_on_with_what_is_not_done_and_loses_no_figure(tmp_path):
    out = tmp_path / "result.json"
    ours = campaign(out)
    ours.run(piece("measures", f"print('{REPORT}')"), ())
    ours.run(piece("fails", f"print('{REPORT}'); raise SystemExit(1)"), ())
    again = result()
    run.go_on(out, again)
    later = Campaign(again, out=out, budget_s=1.0)
    later.run(piece("fails", ""), ())
    assert statuses(out) == {"measures": "done", "fails": "failed"}
    assert again.rows == [Figure(piece=name, **ROW) for name in ("measures", "fails")]
    Campaign(again, out=out, budget_s=3600.0).run(piece("fails", f"print('{REPORT}')"), ())
    assert statuses(out) == {"measures": "done", "fails": "done"}
    assert again.rows == [Figure(piece=name, **ROW) for name in ("measures", "fails")]


def test_the_last_line_of_pytest_becomes_figures():
    found = read_tests("tests", "..F\nFAILED tests/a.py::b - 2 passed\n1 failed, 11 passed, 2 skipped in 80.12s\n")
    assert {row.name: row.value for row in found} == {"tests_failed": 1, "tests_passed": 11, "tests_skipped": 2}
    assert read_tests("tests", "..") == []


def test_in_a_dry_visit_pieces_run_that_can_and_the_page_says_why_others_do_not(tmp_path, monkeypatch):
    out = tmp_path / "result.json"
    told = f"import sys; sys.stderr.write('{ROOT}'); print('{REPORT}' if sys.argv[1:] == ['--dry'] else '')"
    needs_a_gpu = replace(piece("needs_a_gpu", "raise SystemExit(1)"), dry=None)
    needs_sglang = replace(piece("needs_sglang", "raise SystemExit(1)"), sglang=TESTED)
    visit = Visit("a title", (piece("measures", told), needs_a_gpu, needs_sglang))
    monkeypatch.setattr(run, "VISITS", (visit,))
    with pytest.raises(SystemExit) as ended:
        run.main(["--visit", "0", "--dry", "--budget-min", "60", "--out", str(out)])
    assert ended.value.code == 0
    assert statuses(out) == {"measures": "done", "needs_a_gpu": "not run", "needs_sglang": "not run"}
    found = json.loads(out.read_text())
    assert found["rows"] == [{"piece": "measures", **ROW}]
    assert {"python", "torch", "ray"} <= set(found["versions"])
    page = out.with_suffix(".md").read_text()
    assert "# Visit 0: a title\n\ntiny sizes on a CPU" in page
    assert "| measures | a | 1.5 | x | c |" in page
    assert (
        "| needs_sglang | not run | 0 | needs SGLang 0.5.23 or newer; name its interpreter by --sglang |" in page
    )
    assert str(ROOT) not in out.read_text() + page


@pytest.mark.parametrize(
    ("needed", "sglang", "dry", "words"),
    [
        (None, None, False, ""),
        (OLDER, (0, 5, 15), False, ""),
        (TESTED, (0, 5, 15), False, "needs SGLang 0.5.23 or newer; this is 0.5.15"),
        (OLDER, None, False, "needs SGLang 0.5.15 or newer; name its interpreter by --sglang"),
        (OLDER, None, True, ""),  # the embedded engine stands in
        (TESTED, (0, 5, 23), True, ""),
    ],
)
def test_a_piece_runs_with_the_sglang_that_it_needs(needed, sglang, dry, words):
    wants = replace(piece("a", ""), sglang=needed, embedded=needed == OLDER)
    assert lacking(wants, dry=dry, sglang=sglang) == words


def test_the_file_of_another_visit_is_refused(tmp_path):
    out = tmp_path / "result.json"
    run.write(out, result(2, dry=True))
    ran = call(out, "--visit", "1", "--dry")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "has a dry visit 2; name another file" in ran.stderr


def test_a_wheel_in_parts_becomes_whole(tmp_path):
    for place, data in enumerate((b"ab", b"c")):
        (tmp_path / f"big-1-py3-none-any.whl.part-0{place}").write_bytes(data)
    join_parts(tmp_path)
    assert [path.read_bytes() for path in tmp_path.glob("*.whl")] == [b"abc"]


@pytest.mark.slow
def test_the_learner_is_measured_at_a_tiny_size(tmp_path):
    (row,) = learner.step_rows("selective", learner.TINY, device_type="cpu", folder=tmp_path)
    assert row.name == "tokens_per_s_selective"
    assert row.value > 0


def test_every_figure_of_a_publish_is_found_at_a_tiny_size(monkeypatch):
    for name, few in (("FIRST_STEP", 2), ("LAST_STEP", 2), ("FULL_REFRESHES", 1)):
        monkeypatch.setattr(publish, name, few)
    groups = publish.groups(learner.TINY, device_type="cpu", shm=publish.SHARED_MEMORY, repeats=1)
    values = {row.name: row.value for group in groups for row in group}
    wanted = {"publish_stall_ms", "stall_with_cast_over_memcpy", "refresh_full_s", "delta_encode_GBps"}
    assert wanted | {"delta_bytes_1e6", "refresh_delta_1e6_s"} <= set(values)
    assert all(value > 0 for value in values.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--visit", "0", "--dry", "--only", "hops"], "hops: no such piece"),
        (["--visit", "8", "--dry"], "--visit 8: no such visit; choose 0 to 7"),
        (["--visit", "2", "--dry", "--sglang", "no/python"], "--sglang no/python: has no SGLang"),
    ],
)
def test_wrong_options_are_refused_in_a_line(tmp_path, options, words):
    ran = call(tmp_path / "result.json", *options)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert words in ran.stderr


@pytest.mark.parametrize("way", learner.WAYS)
def test_doctors_formula_takes_every_way(tmp_path, way):
    FULL.model.save_pretrained(tmp_path)
    size = replace(FULL, settings=learner.WAYS[way])
    assert 5e9 < learner.expected_bytes(tmp_path, size) < 80e9


def test_a_stripped_wheel_lists_what_is_in_it(tmp_path):
    wheel = tmp_path / "ray-1-py3-none-any.whl"
    names = ["ray/__init__.py", "ray/jars/ray.jar", "ray/jarsome.py", "ray-1.dist-info/RECORD"]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names[:-1]:
            archive.writestr(name, "x")
        archive.writestr(names[-1], "".join(f"{name},,\n" for name in names))
    strip(wheel, ("ray/jars",))
    with zipfile.ZipFile(wheel) as archive:
        kept = archive.namelist()
        assert kept == [name for name in names if name != "ray/jars/ray.jar"]
        assert archive.read(names[-1]).decode().split() == [f"{name},," for name in kept]


def test_wheels_are_of_the_versions_that_are_tested_here():
    pins = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)
    tested = dict(pins.findall((ROOT / "constraints/cpu.txt").read_text()))
    carried = dict(pins.findall((ROOT / "experiments/gpu/wheels.txt").read_text()))
    assert carried["ray"]
    assert {name: version for name, version in carried.items() if tested.get(name, version) != version} == {}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("triton_red_fused__to_copy_clamp_div_exp_gather_logsumexp_mul_neg_select_sub_sum_0", "log-probabilities"),
        ("triton_poi_fused__to_copy_add_arange_div_eq_exp_mul_sub_unsqueeze_0", "log-probabilities"),
        ("triton_poi_fused__to_copy_mul_silu_2", "elementwise"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>", "attention"),
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", "products"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>", "copies"),
        ("void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>", "elementwise"),
    ],
)  # fmt: skip
def test_kernels_are_told_apart_by_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind
