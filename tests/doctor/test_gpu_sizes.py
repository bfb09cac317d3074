"""The smallest GPU of each kind of part, as its nodes report it, and faults of memory by it."""

import json

import pytest

from laminar_lab.doctor import checks
from laminar_lab.doctor.memory import memory_faults, smallest_gpu
from laminar_py.config.loading import load_config
from laminar_py.records.codec import encode
from laminar_py.runtime.cluster.placement import Node
from tests.doctor.test_memory import QWEN_7B, shipped
from tests.runs.runs import REPO

TWO = ("learner.world_size=2", "rollout.replicas=6")  # the learner needs 80.9 GB


@pytest.fixture
def report(monkeypatch):
    """Make nodes of 8 GPUs report these sizes in GB, 0 for none; return the list of the nodes that are asked."""

    def start(**sizes):
        asked = []

        async def on_node(node, function):
            assert function is smallest_gpu
            asked.append(node)
            return encode(int(sizes[node] * 1e9))

        seen = [Node(id=name, ip=name, gpus=8, cpus=64, here=name == "a") for name in sizes]

        async def no_faults(config, placement):
            return []

        monkeypatch.setattr(checks, "nodes", lambda: seen)
        monkeypatch.setattr(checks, "on_node", on_node)
        monkeypatch.setattr(checks, "node_faults", no_faults)
        monkeypatch.setattr(checks, "check_engine", lambda config: None)
        return asked

    return start


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
