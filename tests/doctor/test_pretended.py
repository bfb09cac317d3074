"""`laminar doctor --pretend`: a config on a cluster that is not there."""

import json
import re

import pytest
from typer.testing import CliRunner

from laminar_lab.doctor.checks import fit, fit_pretended, pretended_cluster
from laminar_lab.doctor.memory import gpu_memory
from laminar_py.cli import app
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.runtime.cluster.placement import Needs, make_plan
from tests.doctor.test_memory import QWEN_7B
from tests.runs.fake_cluster import FakeCluster
from tests.runs.runs import REPO

JOINED = "cluster.address=10.0.0.4:6379"


@pytest.fixture
def no_ray(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("Ray is started")

    monkeypatch.setattr("laminar_lab.doctor.checks.open_cluster", refuse)
    monkeypatch.setattr("laminar_py.runtime.preflight.node_checks.on_node", refuse)


def config_7b(folder, *settings, name="7b_24gpu"):
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    path = REPO / "experiments/math_long_cot" / f"{name}.yaml"
    return load_config(path, [f"model.path={folder}", f"runs={folder / 'runs'}", JOINED, *settings])


def placed(config, *groups, **how):
    return fit_pretended(config, pretended_cluster(groups), **how)


@pytest.mark.slow
def test_parts_are_where_the_same_nodes_of_a_real_cluster_would_have_them(tmp_path):
    with FakeCluster(8, 8, 8) as cluster:
        real = fit(config_7b(tmp_path, f"cluster.address={cluster.address}"))
    pretended = placed(config_7b(tmp_path), "3x8xH100")
    shown = [[(parts, gpus) for parts, _, gpus in found.rows] for found in (pretended, real)]
    assert shown[0] == shown[1]
    assert pretended.faults == [] == pretended.warnings


def test_groups_are_nodes_in_their_order_with_the_cores_of_those_without_gpus():
    nodes = pretended_cluster(["2x8xH100,1x4xa100", "2x64xCPU"]).nodes
    assert [node.gpus for node in nodes] == [8, 8, 4, 0, 0]
    assert [node.cpus for node in nodes[-2:]] == [64, 64]
    assert [node.here for node in nodes] == [True, False, False, False, False]
    assert len({node.id for node in nodes}) == 5


@pytest.mark.usefixtures("no_ray")
def test_memory_is_that_of_the_smallest_kind_that_a_part_is_placed_on(tmp_path):
    config = config_7b(tmp_path, "rollout.replicas=8", "learner.world_size=8")
    small, large = (gpu_memory(config, gpu_bytes=size) for size in (80e9, 141e9))
    assert placed(config, "2x8xH200").memory == large
    assert placed(config, "1x8xH200", "1x8xH100").memory in ([small[0], large[1]], [large[0], small[1]])
    assert placed(config, "2x8xH200", gpu_bytes=80e9).memory == small
    (fault,) = placed(
        config.model_copy(update={"learner": config.learner.model_copy(update={"world_size": 1})}), "2x8xH100"
    ).faults
    assert re.match(
        r"learner\.world_size=1: a GPU of the learner needs [0-9.]+ GB and has 80\.0; set it to", fault
    )


@pytest.mark.usefixtures("no_ray")
def test_what_a_cluster_lacks_is_said_as_placement_says_it(tmp_path):
    config, cluster = config_7b(tmp_path), pretended_cluster(["2x8xH100"])
    with pytest.raises(ConfigError) as told:
        make_plan(Needs.from_config(config), cluster.nodes)
    found = fit_pretended(config, cluster)
    assert str(found.unplaced) == str(told.value)
    assert "rollout.replicas=10: there is room for 2" in str(told.value)


@pytest.mark.usefixtures("no_ray")
def test_a_run_that_joins_no_cluster_is_told_that_it_has_one_node(tmp_path):
    alone = config_7b(tmp_path, "cluster.address=null")
    assert "cluster.address is not set" in placed(alone, "3x8xH100").warnings[0]
    assert placed(config_7b(tmp_path, "cluster.address=null", name="7b_8gpu"), "1x8xH100").warnings == []


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.path=nowhere"], "model.path=nowhere: no config.json in it, which tells what its GPUs hold; put"),
        (["rollout.record=[routed_experts]"], "rollout.record=routed_experts: the model in model.path has no"),
    ],
)
def test_what_is_wrong_wherever_it_runs_is_said_here_too(settings, words, tmp_path):
    (fault,) = placed(config_7b(tmp_path, *settings), "3x8xH100").faults
    assert fault.startswith(words)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--pretend", "3x8xV100"], "no such GPU is known; choose A100, H100, H800, H200, B200, RTX4090, or cpu"),
        (["--pretend", "8xH100"], "not nodes x GPUs x kind"),
        (["--pretend", "3x8xH100,"], "not nodes x GPUs x kind"),
        (["--pretend", "0x8xH100"], "not nodes x GPUs x kind"),
        (["--pretend", "100000x8xH100"], "at most 9999 of each"),
        (
            ["rollout.engine.urls=[http://10.0.0.7:1]", "rollout.replicas=1", "--pretend", "2x8xH100"],
            "leave it out",
        ),
    ],
)
def test_what_cannot_be_pretended_is_one_line(arguments, line, tmp_path):
    settings = [f"model.path={tmp_path}", *arguments]
    done = CliRunner().invoke(app, ["doctor", str(REPO / "experiments/math_long_cot/7b_24gpu.yaml"), *settings])
    assert isinstance(done.exception, ConfigError)
    assert line in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_pretended_cluster_needs_a_config():
    done = CliRunner().invoke(app, ["doctor", "--pretend", "3x8xH100"])
    assert str(done.exception) == "--pretend=3x8xH100: needs a config; name its YAML file"


@pytest.mark.usefixtures("no_ray")
def test_a_size_in_place_of_a_model_that_is_not_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    recipe = str(REPO / "experiments/math_long_cot/7b_8gpu.yaml")
    fits = CliRunner().invoke(app, ["doctor", recipe, "--model", "7B", "--pretend", "1x8xH100"])
    assert (fits.exit_code, "engine's weights" in fits.output) == (0, True)
    larger = CliRunner().invoke(app, ["doctor", recipe, "--model", "14B", "--pretend", "1x8xH100"])
    assert larger.exit_code == 2
    assert "learner.world_size=4: a GPU of the learner needs" in larger.output
    unknown = CliRunner().invoke(app, ["doctor", recipe, "--model", "99B", "--pretend", "1x8xH100"])
    assert str(unknown.exception).startswith("model=99B: no folder, and no model that is known")
    alone = CliRunner().invoke(app, ["doctor", "--model", "7B"])
    assert str(alone.exception).startswith("--model=7B: needs a config")


@pytest.mark.usefixtures("no_ray")
def test_like_nodes_are_shown_as_one_row_and_a_fault_ends_with_2(tmp_path):
    config_7b(tmp_path)
    where = [str(REPO / "experiments/math_long_cot/7b_24gpu.yaml"), f"model.path={tmp_path}", JOINED]
    done = CliRunner().invoke(app, ["doctor", *where, "--pretend", "3x8xH100,2x64xcpu"])
    assert done.exit_code == 0
    assert "node-0 to node-2" in done.output
    assert "node-3 to node-4" in done.output
    done = CliRunner().invoke(app, ["doctor", *where, "learner.world_size=1", "--pretend", "3x8xH100"])
    assert done.exit_code == 2
