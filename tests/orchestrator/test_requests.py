"""Requests of `laminar set`: taken while the learner has no batch, refused in one line, shown and recorded."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from laminar_py.config.loading import load_config
from laminar_py.ledger.requests import WANTED, write_wanted
from laminar_py.ledger.run_folder import LOCK, RunFolder
from laminar_py.records.events import SettingChanged
from laminar_py.runtime.orchestrator import requests as requests_module
from laminar_py.runtime.orchestrator.requests import SettingRequests
from tests.control.fleet import Fleet
from tests.control.test_steering import ROW
from tests.orchestrator.test_fleet import NO_SETS, DiskLog
from tests.runs.runs import REPO
from tests.workers.fakes import make_incarnation

PATIENCE = 20_000  # looks, a millisecond or more apart
BOUND = "staleness.max_staleness"


class Ranks:
    """A learner's ranks as requests see them."""

    def __init__(self):
        self.num_ranks, self.requested, self.resizing = 1, None, asyncio.Event()

    def request(self, ranks):
        self.drop_request()
        self.requested = ranks if ranks != self.num_ranks else None
        return self.requested is not None

    def drop_request(self):
        self.requested = None
        self.resizing.clear()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Requests whose loop looks all the time, their scheduler, and what they show, raise and have grown."""
    monkeypatch.setattr(requests_module, "HOUSEKEEPING_S", 0.001)
    log, seen = DiskLog(), SimpleNamespace(lines=[], alarms=[], grown=[], path=tmp_path, room=1, learner=Ranks())
    fleet = Fleet(max_staleness=4, recorder=log)

    async def refresh(age_s):
        assert age_s > 0

    placement = SimpleNamespace(
        needs=SimpleNamespace(gone=frozenset()), has_room=lambda ranks: ranks <= seen.room, refresh=refresh
    )
    requests = SettingRequests(
        make_incarnation(
            config=load_config(REPO / "configs/quickstart.yaml", []),
            run=RunFolder(tmp_path),
            ledger=log,
            inputs=NO_SETS,
            placement=placement,
        ),
        scheduler=fleet.scheduler,
        replicas=SimpleNamespace(left={}),
        scoring=SimpleNamespace(grow=seen.grown.append),
        dispatch_loop=SimpleNamespace(wake=lambda: None),
        alarms=SimpleNamespace(show_line=seen.lines.append, tell=lambda *alarm: seen.alarms.append(alarm)),
        learner=seen.learner,
    )
    return requests, fleet.scheduler, seen


async def until(condition):
    for _ in range(PATIENCE):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


def changes(scheduler):
    return [one for one in scheduler.state.recorder.events if isinstance(one, SettingChanged)]


async def test_a_request_is_recorded_and_shown_and_a_wrong_one_is_a_line(made):
    requests, scheduler, seen = made
    loop = asyncio.create_task(requests.run())
    write_wanted(seen.path, ["learner.lr=1"])
    write_wanted(seen.path, [f"{BOUND}=2", "buffer.capacity=800"])
    await until(lambda: len(seen.lines) == 2)
    await until(lambda: not list(seen.path.iterdir()))
    loop.cancel()
    assert "a running run takes" in seen.lines[0]
    assert seen.lines[1] == f"step 0: {BOUND} 4 -> 2; step 0: buffer.capacity its default -> 800"
    assert [(one.name, one.value, one.by) for one in changes(scheduler)] == [
        (BOUND, 2, "user"),
        ("buffer.capacity", 800, "user"),
    ]
    assert max(seen.grown) > 800, "the queue before scorers has room"


async def test_a_request_waits_until_the_learner_has_no_batch(made):
    requests, scheduler, seen = made
    scheduler.state.num_in_step = 4
    loop = asyncio.create_task(requests.run())
    write_wanted(seen.path, [f"{BOUND}=2"])
    await until(lambda: requests._waiting)
    await asyncio.sleep(0.01)
    assert scheduler.state.settings.bound.max_staleness == 4
    assert list(seen.path.iterdir()), "it would not be lost with the controller"
    scheduler.state.num_in_step = 0
    requests.stepped(ROW, SimpleNamespace(spare=0, waited_s=0.0))
    assert scheduler.state.settings.bound.max_staleness == 2
    await until(lambda: not list(seen.path.iterdir()))
    loop.cancel()
    assert seen.alarms == [("staleness", "learner", "")], "no words, no alarm"


async def test_ranks_of_the_learner_change_once_there_are_gpus_for_them(made, monkeypatch):
    monkeypatch.setattr(requests_module, "RETRY_S", 0.001)
    requests, scheduler, seen = made
    loop = asyncio.create_task(requests.run())
    write_wanted(seen.path, ["learner.world_size=2", f"{BOUND}=2"])
    await until(lambda: len(seen.lines) == 2)
    assert seen.lines[0] == "learner.world_size=2: waits until so many GPUs are free"
    assert scheduler.state.settings.bound.max_staleness == 2, "it does not wait for the ranks"
    await asyncio.sleep(0.02)
    assert not seen.learner.resizing.is_set()
    assert list(seen.path.iterdir()), "it would not be lost with the controller"
    seen.room = 2
    await until(seen.learner.resizing.is_set)
    assert [one.name for one in changes(scheduler)] == [BOUND], "the trainer makes the change"
    seen.learner.drop_request()
    seen.learner.num_ranks = 2
    await until(lambda: not list(seen.path.iterdir()))
    loop.cancel()
    assert [(one.name, one.value) for one in changes(scheduler)] == [(BOUND, 2), ("learner.world_size", 2)]
    assert seen.lines[2] == "step 0: learner.world_size 1 -> 2"


async def test_a_later_request_for_ranks_replaces_one_that_waits(made):
    requests, scheduler, seen = made
    loop = asyncio.create_task(requests.run())
    write_wanted(seen.path, ["learner.world_size=2"])
    await until(lambda: seen.learner.requested == 2)
    write_wanted(seen.path, ["learner.world_size=1"])
    await until(lambda: len(seen.lines) == 2)
    await until(lambda: not list(seen.path.iterdir()))
    loop.cancel()
    assert seen.lines[1] == "learner.world_size is 1 already"
    assert seen.learner.requested is None
    assert not changes(scheduler)


async def test_a_set_is_refused_as_a_whole_and_a_request_to_an_earlier_controller_is_one_line(made):
    requests, scheduler, seen = made
    write_wanted(seen.path, [f"{BOUND}=1"])
    lock = seen.path / LOCK
    lock.touch()
    os.utime(lock, ns=(0, (seen.path / WANTED).stat().st_mtime_ns + 1))
    loop = asyncio.create_task(requests.run())
    await until(lambda: seen.lines)
    assert seen.lines == [f"{BOUND}=1: was asked of an earlier controller, and is discarded; ask again"]
    os.utime(lock, ns=(0, 0))
    write_wanted(seen.path, ["buffer.capacity=800", "learner.publish_every=9"])
    await until(lambda: len(seen.lines) == 2)
    assert "trajectories between two versions are older" in seen.lines[1]
    write_wanted(seen.path, ["learner.publish_every=6", f"{BOUND}=8"])
    await until(lambda: len(seen.lines) == 3)
    loop.cancel()
    assert [(one.name, one.value) for one in changes(scheduler)] == [("learner.publish_every", 6), (BOUND, 8)]
