"""Experiments on a Ray cluster that their runs join."""

import asyncio
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from laminar_lab.commands.launch import _work
from laminar_lab.launcher import queue
from laminar_lab.launcher.board import Board
from laminar_lab.launcher.plan import make_slots
from laminar_lab.launcher.room import has_room
from laminar_lab.launcher.standing import RunState, read_standings
from laminar_py.cli import app
from laminar_py.ledger.database import open_writer
from laminar_py.ledger.run_folder import new_run
from laminar_py.observe.fleet import note_placed
from laminar_py.runtime.cluster.backend import all_placed
from laminar_py.runtime.cluster.ray_cluster import ray
from tests.launcher.experiments import make_experiment, program, small_settings, start_launcher
from tests.launcher.test_queue import COUNT, FINISH, write_summary
from tests.runs.fake_cluster import FakeCluster, joined
from tests.runs.runs import PATIENCE_S, REPO, forget_versions

HOLD = """
import sys, time
from pathlib import Path
import ray
from laminar_py.runtime.cluster.backend import nodes, open_cluster
from laminar_py.ledger.run_folder import RunFolder
class Idle:
    pass
address, folder = sys.argv[1:]
with open_cluster(address):
    run = RunFolder(Path(folder))
    run.lock()
    held = [ray.remote(num_gpus=1)(Idle).remote() for _ in range(2)]
    while any(node.gpus for node in nodes()):
        time.sleep(0.05)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_runs_share_a_cluster_side_by_side_as_many_as_fit_on_its_nodes(tmp_path):
    with FakeCluster(4, 3) as cluster:
        joined = {"cluster.address": cluster.address}
        gpus = joined | {"cluster.learner_device": "cuda", "learner.world_size": 2}
        slots = make_slots(make_experiment(tmp_path / "gpus", set=gpus, seeds=5))
        assert [slot.gpus for slot in slots] == [None] * 3

        settings = small_settings(tmp_path, steps=30, **joined)
        experiment = make_experiment(tmp_path / "runs", set=settings, seeds=2, parallel=2)
        launcher = start_launcher(experiment.file)
        try:
            code = launcher.wait(timeout=PATIENCE_S)
        finally:
            launcher.kill()
            for run in experiment.runs:
                forget_versions(run.config.runs / f"{run.name}-1")
        told = (experiment.folder / "launch.out").read_text()
        assert code == 0, told
        cluster.wait_until_empty()
    assert [one.state for one in read_standings(experiment)] == [RunState.FINISHED] * 2
    assert all(run.folder.placed.is_file() for run in experiment.runs)
    assert told.index("s1: running") < told.index("s0: finished"), "side by side"


@pytest.mark.slow
def test_after_a_killed_launcher_slots_are_counted_once_its_runs_have_given_their_gpus_back(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    with FakeCluster(2) as cluster:
        settings = {"cluster.address": cluster.address, "cluster.learner_device": "cuda", "steps": 1}
        experiment = make_experiment(tmp_path, set=settings, seeds=2)
        begun = new_run(experiment.runs[0].config)
        open_writer(begun.ledger).close()
        command = [sys.executable, "-c", HOLD, cluster.address, str(begun.path)]
        with subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as before:
            assert before.stdout.readline() == b"held\n"
            plan = CliRunner().invoke(app, ["launch", str(tmp_path), "--dry-run"])
            assert "2 runs of 1 variants, 2 at a time on the Ray cluster" in plan.stdout, "beside what runs"
            monkeypatch.setattr(Board, "note", lambda *_: before.stdin.close())  # once somebody waits for it
            train, real = program(tmp_path, COUNT + FINISH), queue.python
            monkeypatch.setattr(queue, "python", lambda name: train if name == "laminar_py.cli" else real(name))
            write_summary(tmp_path)
            assert _work(experiment)
    assert [one.state for one in read_standings(experiment)] == [RunState.FINISHED] * 2


async def test_a_cluster_tells_whether_it_has_room(tmp_path):
    with FakeCluster(2) as cluster:
        settings = {"cluster.address": cluster.address, "cluster.learner_device": "cuda"}
        small, large = make_experiment(tmp_path, set=settings, grid={"learner.world_size": [2, 3]}).runs
        small.config.runs.mkdir()
        small.write()
        large.write()
        assert await has_room(small.arguments)
        assert not await has_room(large.arguments)
    assert not await has_room(small.arguments), "it is away"


def wait_for_actors(count):
    """Until the cluster has heard of so many."""
    deadline = time.monotonic() + PATIENCE_S
    while len(ray._private.state.actors()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_processes_are_placed_once_all_have_their_gpus(tmp_path):
    class Idle:
        """An actor."""

    with joined(FakeCluster(1)):
        async with asyncio.timeout(60):
            holder = ray.remote(num_gpus=1)(Idle).remote()
            await note_placed(tmp_path / "first", all_placed=all_placed)
            waiting = ray.remote(num_gpus=1)(Idle).remote()
            await asyncio.to_thread(wait_for_actors, 2)
            assert not await all_placed()
            ray.kill(holder)
            await note_placed(tmp_path / "second", all_placed=all_placed)
            del waiting
    assert (tmp_path / "first").is_file()
