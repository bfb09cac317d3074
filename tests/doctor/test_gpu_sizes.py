"""The smallest GPU of each kind of part, as its nodes report it, and faults of memory by it."""

import json
from functools import partial

import pytest

from laminar_lab.doctor import checks
from laminar_lab.doctor.memory import memory_faults
from laminar_py.config.loading import load_config
from tests.doctor.test_memory import QWEN_7B, shipped
from tests.doctor.test_run_check import TWO, reported
from tests.runs.runs import REPO


@pytest.fixture
def report(monkeypatch):
    """Make nodes of 8 GPUs report these sizes in GB, 0 for none; return the list of the nodes that are asked."""

    async def no_faults(config, placement):
        return []

    monkeypatch.setattr(checks, "node_faults", no_faults)
    monkeypatch.setattr(checks, "check_engine", lambda config: None)
    return partial(reported, monkeypatch, checks)


def test_a_run_that_its_gpus_cannot_hold_has_the_fault_of_the_formula(tmp_path, report):
    config = shipped("7b_8gpu", tmp_path, *TWO)
    report(a=80)
    assert checks.fit(config).faults == memory_faults(config)
    report(a=0)
    assert checks.fit(config).faults == memory_faults(config), "80 GB where no node tells"
    report(a=141)
    assert checks.fit(config).faults == []


def test_only_gpus_that_a_run_uses_are_asked_for_their_memory(tmp_path, report):
    asked = report(a=80, b=24)
    assert checks.fit(shipped("7b_8gpu", tmp_path)).faults == []
    assert asked == ["a"]


def test_on_cpus_no_gpu_is_asked_for_its_memory(tmp_path, report):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    asked = report(a=80)
    checks.fit(load_config(REPO / "configs" / "quickstart.yaml", [f"model.path={tmp_path}"]))
    assert asked == []
