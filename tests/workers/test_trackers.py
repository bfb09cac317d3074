"""What a run tells its trackers, and that it waits for none of them. Real processes of a real Ray cluster."""

import asyncio
import contextlib
import importlib.util
import logging
import os
import socket
import time

import psutil
import pytest

from laminar_py.config.tracking import Opening
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.observe.stats import Stats, Totals
from laminar_py.observe.summary import summarise
from laminar_py.observe.trackers import Values
from laminar_py.records.host import SystemClock
from laminar_py.runtime.cluster.backend import nodes, open_cluster
from laminar_py.runtime.cluster.placement import Needs, Placement
from laminar_py.runtime.workers.trackers import TrackerKeeper, Trackers
from tests.builders import make_config, make_evaluated
from tests.ledger.runs import begin, open_ledger
from tests.telemetry.rows import make_row
from tests.workers.fakes import make_incarnation

ENOUGH_S = 240.0  # a tracker is nice, and others fill the cores
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")


@pytest.fixture(scope="module")
def placement():
    """Where the trackers' processes go."""
    with open_cluster(None):
        yield Placement(Needs(ranks=1, rank_gpus=0, replicas=1, replica_gpus=0), nodes)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "small-1")
    folder.logs.mkdir(parents=True)
    return folder


@pytest.fixture
def incarnation(run, placement):
    return make_incarnation(config=SMALL, run=run, placement=placement)


def make_link(incarnation, *, kind="tensorboard", **limits):
    opening = Opening(kind=kind, folder=str(incarnation.run.path), name="math-1", project="math", settings={})
    return TrackerKeeper(opening, incarnation, **limits)


def scalars(run, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run.path / "tensorboard"
    found = EventAccumulator(str(folder)).Reload() if folder.is_dir() else None
    if found is None or name not in found.scalars.Keys():
        return []
    return [(event.step, event.value) for event in found.Scalars(name)]


def tracker_processes():
    """Those whose working directory is this test's: other workers' processes are of the same fork server."""
    server = psutil.Process(int(os.environ["LAMINAR_FORK_SERVER_PID"]))
    found = []
    for child in server.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if child.name().startswith("tracker-") and child.cwd() == os.getcwd():
                found.append(child)
    return found


async def until_gone():
    """The kernel ends a killed process a moment later."""
    _, left = await asyncio.to_thread(psutil.wait_procs, tracker_processes(), timeout=ENOUGH_S)
    assert left == []


SMALL = make_config(name="small", tracking={"kinds": ["tensorboard"]})


async def until_read(run, *points):
    """The tracker's process writes when it comes to it, which a core must be left for."""

    def look():
        time.sleep(0.2)
        return scalars(run, "tokens/entropy")

    async with asyncio.timeout(ENOUGH_S):
        while await asyncio.to_thread(look) != list(points):
            pass


@needs_tensorboard
async def test_a_run_with_a_roll_back_is_in_its_tracker_as_it_went_in_the_end(run, incarnation):
    trackers = Trackers(incarnation, resumed=False)
    trackers.start()
    for step, entropy in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5)):
        trackers.step(make_row(step, entropy=entropy))
    trackers.evaluated(make_evaluated(0.75, version=1, step=1, rl_s=12.0))
    async with open_ledger(run.path) as ledger:
        begin(ledger, versions=(0,))
    summary = summarise(
        run, Stats(SystemClock(), replicas=1, totals=Totals()), finished=True, restarts={}, sets=["heldout"]
    )
    await trackers.close(summary)
    assert scalars(run, "tokens/entropy") == [(1, 1.0), (2, 2.5), (3, 3.5)]
    assert scalars(run, "staleness_3-4/entropy") == [(1, 1.0), (2, 2.5), (3, 3.5)]
    assert scalars(run, "run/mfu") == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert scalars(run, "eval/heldout/mean") == [(1, 0.75)]
    assert scalars(run, "summary/finished") == [(3, 1.0)]
    await until_gone()


@needs_tensorboard
async def test_a_run_that_resumes_from_its_beginning_has_every_step_once(run, incarnation):
    for resumed, last in ((False, 2), (True, 3)):
        trackers = Trackers(incarnation, resumed=resumed)
        trackers.start()
        for step in range(1, last + 1):
            trackers.step(make_row(step, entropy=float(last)))
        await until_read(run, *((step, float(last)) for step in range(1, last + 1)))
        await trackers.close(None)
    assert scalars(run, "tokens/entropy") == [(1, 3.0), (2, 3.0), (3, 3.0)]


@needs_tensorboard
async def test_what_does_not_fit_the_queue_is_dropped_with_one_warning(run, incarnation, caplog):
    link = make_link(incarnation, queued=2)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            link.enqueue_message(Values(step, {}))
    assert [record.getMessage() for record in caplog.records] == [
        "tracker tensorboard: messages are dropped: 2 wait for it"
    ]
    link.start()
    await link.close({}, limit_s=ENOUGH_S)
    assert link.undelivered == 3


@needs_mlflow
async def test_a_server_that_never_answers_holds_nothing_up(run, incarnation, monkeypatch, caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        link = make_link(incarnation, kind="mlflow", queued=3)
        link.start()
        for step in range(4):
            link.enqueue_message(Values(step, {}))
            await asyncio.sleep(0)
        async with asyncio.timeout(ENOUGH_S):
            await asyncio.get_running_loop().sock_accept(set_nonblocking(silent))  # it has asked, and waits
        await link.close({"summary/finished": 1.0}, limit_s=0.1)
    assert link.undelivered == 5, "four rows and the end"
    assert "5 messages did not arrive" in caplog.text
    await until_gone()


def set_nonblocking(server):
    server.setblocking(False)
    return server


@needs_tensorboard
async def test_a_tracker_that_is_killed_comes_back_and_goes_on(run, incarnation):
    link = make_link(incarnation, retry_s=1.1)  # its files are ordered by the second they were begun in
    link.start()
    link.enqueue_message(Values(1, {"tokens/entropy": 1.0}))
    await until_read(run, (1, 1.0))
    (child,) = tracker_processes()
    child.kill()
    link.enqueue_message(Values(2, {"tokens/entropy": 2.0}))  # lost with it
    link.enqueue_message(Values(3, {"tokens/entropy": 3.0}))
    await until_read(run, (1, 1.0), (3, 3.0))
    await link.close({}, limit_s=ENOUGH_S)
    assert link.undelivered == 1
    assert incarnation.supervisor.total_restarts == 0, "the run does not count it"


@needs_tensorboard
async def test_a_tracker_that_cannot_begin_costs_its_own_messages_alone(run, incarnation, caplog):
    (run.path / "tensorboard").write_text("a file where a folder should be")
    link = make_link(incarnation, retry_s=0.05)
    link.start()
    for step in range(3):
        link.enqueue_message(Values(step, {}))
    await link.close({}, limit_s=ENOUGH_S)
    assert link.undelivered == 4
    assert "its process crashed (TrackerError: FileExistsError" in caplog.text
    assert caplog.text.count("messages are dropped") == 1
