"""Refusal of a run that its GPUs cannot hold, by the sizes that the nodes of these GPUs report."""

import json
import re

import pytest

from laminar_lab.doctor import checks
from laminar_lab.doctor.memory import memory_faults, smallest_gpu
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.records.codec import encode
from laminar_py.runtime.cluster.placement import Node
from laminar_py.runtime.preflight import node_checks
from laminar_py.runtime.preflight.node_checks import place_parts
from tests.doctor.test_memory import QWEN_7B, shipped
from tests.runs.runs import REPO

TWO = ("learner.world_size=2", "rollout.replicas=3")  # the learner needs 80.9 GB


def reported(monkeypatch, module, **sizes):
    """Make nodes of 8 GPUs report these sizes in GB, 0 for none, to a module; return the nodes that are asked."""
    asked = []

    async def on_node(node, function):
        assert function is smallest_gpu
        asked.append(node)
        return encode(int(sizes[node] * 1e9))

    seen = [Node(id=name, ip=name, gpus=8, cpus=64, here=name == "a") for name in sizes]
    monkeypatch.setattr(module, "nodes", lambda: seen)
    monkeypatch.setattr(checks, "on_node", on_node)
    return asked


async def test_a_run_that_its_gpus_cannot_hold_is_refused_with_the_line_of_the_doctor(tmp_path, monkeypatch):
    config = shipped("7b_8gpu", tmp_path, *TWO)
    reported(monkeypatch, node_checks, a=80)
    with pytest.raises(ConfigError, match=re.escape(memory_faults(config)[0])):
        await place_parts(config)
    await place_parts(shipped("7b_8gpu", tmp_path))
    reported(monkeypatch, node_checks, a=141)
    await place_parts(config)


async def test_only_gpus_that_a_run_uses_are_asked_for_their_memory(tmp_path, monkeypatch):
    asked = reported(monkeypatch, node_checks, a=80, b=24)
    await place_parts(shipped("7b_8gpu", tmp_path))
    assert asked == ["a"]


async def test_the_learner_is_not_refused_for_the_gpus_of_engines(tmp_path, monkeypatch, caplog):
    config = shipped("7b_8gpu", tmp_path, "learner.world_size=2", "rollout.replicas=5")
    asked = reported(monkeypatch, node_checks, a=141, b=80)
    await place_parts(config)
    assert (asked, caplog.text) == (["a", "b"], "")


@pytest.mark.parametrize(("size", "resume"), [(0, False), (80, True)])
async def test_a_guessed_size_and_a_run_to_resume_get_a_warning(size, resume, tmp_path, monkeypatch, caplog):
    reported(monkeypatch, node_checks, a=size)
    await place_parts(shipped("7b_8gpu", tmp_path, *TWO), resume=resume)
    assert "learner.world_size=2: a GPU of the learner needs 80.9 GB and has 80.0; set it to 3" in caplog.text


async def test_on_cpus_no_gpu_is_asked_for_its_memory(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    asked = reported(monkeypatch, node_checks, a=80)
    await place_parts(load_config(REPO / "configs" / "quickstart.yaml", [f"model.path={tmp_path}"]))
    assert asked == []
