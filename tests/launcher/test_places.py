"""Runs side by side, and the GPUs of each."""

import contextlib
import os

import pytest

from laminar_lab.curves import count_devices
from laminar_lab.launcher.plan import busy_gpus, make_slots
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import new_run
from laminar_py.runtime.cluster.placement import Needs, Node, make_plan
from tests.launcher.experiments import make_experiment

GPUS = {"set": {"cluster.learner_device": "cuda", "learner.world_size": 8}}


JUDGE = {"kind": "judge", "servers": "prm"}
SERVED = {"reward.use": [JUDGE], "reward.servers": {"prm": {"model": "/models/prm", "count": 3, "gpus": 2}}}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A host with 20 GPUs, by what it lets its processes see."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(20))))


def test_runs_go_side_by_side_on_gpus_of_their_own(tmp_path):
    slots = make_slots(make_experiment(tmp_path, seeds=5, **GPUS))
    assert [slot.gpus for slot in slots] == [tuple(map(str, range(8))), tuple(map(str, range(8, 16)))]


def test_there_are_no_more_slots_than_runs(tmp_path):
    assert len(make_slots(make_experiment(tmp_path, seeds=1, **GPUS))) == 1


def test_the_largest_variant_says_how_many_fit(tmp_path):
    grid = {"learner.world_size": [2, 10]}
    slots = make_slots(make_experiment(tmp_path, grid=grid, seeds=5, **GPUS))
    assert [len(slot.gpus) for slot in slots] == [10, 10]


def test_more_at_a_time_than_gpus_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"parallel=3: there is room for 2 at a time, each with 8 GPUs; lower"):
        make_slots(make_experiment(tmp_path, seeds=5, parallel=3, **GPUS))


def test_a_run_for_which_there_are_too_few_gpus_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="needs"):
        make_slots(make_experiment(tmp_path, **GPUS))


@pytest.mark.parametrize(
    "settings",
    [
        {"cluster.learner_device": "cuda", "learner.world_size": 3},
        {"cluster.learner_device": "cuda", "algorithm.kl_coef": 0.1, "algorithm.reference_pass": "stage"},
    ],
)
def test_the_gpus_of_a_run_are_those_that_its_parts_are_placed_on(tmp_path, settings):
    (run,) = make_experiment(tmp_path, set=settings | SERVED).runs
    needs = Needs.from_config(run.config)
    plan = make_plan(needs, [Node(id="a", ip="", gpus=50)])
    placed = [place.gpus for place in (*plan.learner, *plan.replicas, *plan.servers, plan.reference) if place]
    assert run.config.gpus == sum(placed) > 6
    assert count_devices(run.config) == (run.config.gpus, "GPU")


def test_gpus_whose_memory_others_use_are_given_to_no_run_unless_the_user_chose_them(tmp_path, monkeypatch):
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nprintf '0, 61000\\n1, 3\\n2, [N/A]\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    experiment = make_experiment(tmp_path, set={"cluster.learner_device": "cuda"}, seeds=3)
    assert (busy_gpus(experiment), len(make_slots(experiment))) == ([], 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert busy_gpus(experiment) == ["0"]
    assert [slot.gpus for slot in make_slots(experiment)] == [("1",), ("2",)]
    with locked(new_run(experiment.runs[0].config)):
        assert busy_gpus(experiment) == [], "perhaps it is that run which uses it"


@contextlib.contextmanager
def locked(folder):
    folder.lock()
    yield
    folder.unlock()


def test_without_gpus_runs_go_one_after_another_unless_told_otherwise(tmp_path):
    assert len(make_slots(make_experiment(tmp_path, seeds=5))) == 1
    slots = make_slots(make_experiment(tmp_path, seeds=5, parallel=3))
    assert [slot.gpus for slot in slots] == [()] * 3


def test_runs_that_would_share_a_port_go_one_after_another(tmp_path):
    with pytest.raises(ConfigError, match="parallel=2: runs would share one server or port"):
        make_slots(make_experiment(tmp_path, seeds=5, parallel=2, set={"relay.base_port": 4000}))
