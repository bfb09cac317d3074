"""Memory of runs on cores, by formula, against the measurements of experiments/smollm2/README.md."""

import json

import pytest

from laminar_lab.doctor import checks
from laminar_lab.doctor.checks import fit
from laminar_lab.doctor.cpu_memory import OTHERS, cpu_faults, cpu_memory
from laminar_py.config.loading import load_config
from tests.doctor.test_memory import SMOLLM2
from tests.runs.runs import REPO

GB = 1e9
TWO = ("learner.recompute=all", "rollout.replicas=2", "rollout.max_batch=64", "rollout.batch_per_replica=64")


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2 | {"torch_dtype": "float32"}))

    def load(*settings):
        places = ("data.prepare=null", f"model.path={tmp_path}")
        return load_config(REPO / "experiments/smollm2/smollm2.yaml", [*places, *settings])

    return load


def each(config):
    return {column.kind: sum(column.parts.values()) / GB for column in cpu_memory(config)}


@pytest.mark.parametrize(
    ("settings", "learner", "replica"),
    [
        (("packer.max_tokens=2048",), 5.6, 2.1),
        (("packer.max_tokens=512",), 2.1, 2.1),
        (("packer.max_tokens=512", *TWO), 1.7, 1.7),
    ],
)
def test_learner_and_replica_are_within_a_fifth_of_measured_peaks(run, settings, learner, replica):
    found = each(run(*settings))
    assert found["learner"] == pytest.approx(learner, rel=0.2)
    assert found["replica"] == pytest.approx(replica, rel=0.2)


def test_a_frozen_model_in_a_process_of_its_own_has_a_row(run, tmp_path):
    found = each(run(f"algorithm={{name: distill, teacher: {tmp_path}, kl_coef: 0.1, reference_pass: stage}}"))
    assert found["teacher"] == found["reference"] > 4 * 135e6 / GB
    assert "teacher" not in each(run("algorithm={name: distill, teacher: 'http://127.0.0.1:9'}"))


def test_large_microbatches_of_a_pretrained_model_are_refused_with_the_size_that_fits(run):
    config = run("packer.max_tokens=8192")
    assert 17 < each(config)["learner"] < 21
    warnings, (line,) = cpu_faults(config, memory=10 * GB)
    assert not warnings
    assert line.startswith("packer.max_tokens=8192: the run needs 2")
    assert "this machine has 10.0; set it to 1024, which needs" in line
    assert cpu_faults(run("packer.max_tokens=1024"), memory=10 * GB) == ([], [])


def test_a_run_that_nearly_fills_the_machine_is_a_warning(run):
    config = run("packer.max_tokens=2048")
    total = sum(column.total for column in cpu_memory(config))
    (line,), faults = cpu_faults(config, memory=1.1 * total)
    assert (faults, "set it to 1024" in line) == ([], True)


def test_where_small_microbatches_do_not_suffice_activations_are_computed_again(run):
    settings = (
        "packer.max_tokens=2048",
        "rollout.max_len=2048",
        "rollout.max_batch=8",
        "rollout.batch_per_replica=8",
    )
    _, (line,) = cpu_faults(run(*settings), memory=7 * GB)
    assert "has 7.0; set learner.recompute to all, which needs" in line


def test_where_no_microbatch_fits_the_largest_part_is_named(run):
    _, (line,) = cpu_faults(run("packer.max_tokens=2048", "rollout.max_batch=2048"), memory=8 * GB)
    assert line.endswith("lower rollout.max_batch or rollout.replicas, since KV cache takes 12.1")


def test_doctor_compares_the_run_with_this_machines_memory(run, monkeypatch):
    monkeypatch.setattr(checks, "host_memory", lambda: 8 * GB)
    found = fit(run("packer.max_tokens=8192"))
    assert [column.kind for column in found.cpu_memory] == ["learner", "replica", OTHERS]
    assert any(line.startswith("packer.max_tokens=8192: the run needs") for line in found.faults)


def test_parts_on_gpus_or_of_other_nodes_have_no_row():
    assert cpu_memory(load_config(REPO / "experiments/math_long_cot/7b_8gpu.yaml", [])) == []
