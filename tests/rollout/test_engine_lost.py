"""The embedded engine dies inside: the last report has everything that it gave, and others go on from there."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from laminar_py.records.engine import EngineLostError
from laminar_py.records.trajectory import InterruptReason
from laminar_py.relay.sockets import PeerClient, PeerServer, generate_keys, peer_sockets
from laminar_py.runtime.link.hub import ReplicaHub
from laminar_py.runtime.link.replica_link import ReplicaLink
from laminar_py.runtime.workers.processes.replica import ReplicaActor
from tests.builders import make_config
from tests.rollout.test_replica import assignment, folders, serving  # noqa: F401 (`folders` is a fixture)

KEYS = generate_keys()


async def dies_with(story, *names):
    """A replica whose engine fails at a step while all of these run; what it had reported by then."""
    await story.until(lambda s: s.admissible > 0)
    story.replica.start_assignments([assignment(name, length=1500, temperature=0.0) for name in names])
    await story.until(lambda s: all(s.ids[name] for name in names))
    given = {name: running.length for name, running in story.replica._streams.running.items()}
    story.replica._engine._scheduler.step = lambda: 1 / 0
    return given


async def test_the_last_report_of_a_dead_engine_has_all_that_it_gave(folders):  # noqa: F811
    async with serving(folders) as (story, _):
        given = await dies_with(story, "a", "b")
        with pytest.raises(EngineLostError, match="embedded engine: ZeroDivisionError: division by zero"):
            await story.until(lambda s: False)
        assert set(story.broken[InterruptReason.ENGINE_LOST]) == {"a", "b"}
        assert all(len(story.ids[name]) >= length > 0 for name, length in given.items())
        assert isinstance(story.replica._admission.lost_error.__cause__, ZeroDivisionError)
        assert not story.task.done(), "the loss is the replica's to tell, and ends none of its tasks"


async def test_a_mistake_in_the_engine_is_told_as_one_after_the_last_report(folders):  # noqa: F811
    broken = []

    async def take(reports):
        broken.extend(progress.broken for _, report in reports for progress in report.progress)

    async with serving(folders) as (story, _), hub_of(take) as hub:
        await dies_with(story, "a")
        process, wire = ReplicaActor(), peer_sockets(KEYS)
        link = ReplicaLink(PeerClient(wire, hub.endpoint, "r"), story.replica, attach=print, quiet_s=0.1)
        process._replica, process._task, process._listening = story.replica, story.task, story.task
        process._link = asyncio.create_task(link.run())
        process._config = make_config()
        with pytest.raises(ZeroDivisionError):  # no `EngineLostError`, after which another would be started
            await process.ended()
        wire.close()
    assert InterruptReason.ENGINE_LOST in broken


@asynccontextmanager
async def hub_of(take):
    """A hub with a connection "r"."""
    hub = ReplicaHub(PeerServer(KEYS, "127.0.0.1"), on_reports=take, heartbeat_timeout_s=60.0)
    hub.open("r", 0)
    serves = asyncio.create_task(hub.run())
    try:
        yield hub
    finally:
        serves.cancel()
        await asyncio.wait([serves])
        hub.end()


async def test_a_trajectory_of_a_dead_engine_goes_on_elsewhere_as_if_nothing_had_happened(folders):  # noqa: F811
    async with serving(folders) as (whole, _):
        await whole.until(lambda s: s.admissible > 0)
        whole.replica.start_assignments([assignment("a", length=1500, temperature=0.0)])
        await whole.until(lambda s: "a" in s.ended)
    async with serving(folders) as (story, _):
        await dies_with(story, "a")
        with pytest.raises(EngineLostError):
            await story.until(lambda s: False)
        partial = story.ids["a"]
    assert 0 < len(partial) < 1500
    async with serving(folders) as (other, _):
        await other.until(lambda s: s.admissible > 0)
        rest = assignment("a", length=1500, tokens=story.tokens["a"], temperature=0.0)
        other.ids["a"] += partial
        other.replica.start_assignments([rest])
        await other.until(lambda s: "a" in s.ended)
        assert other.ids["a"] == whole.ids["a"]


async def test_a_replica_whose_engine_died_answers_until_its_last_report_was_taken(folders):  # noqa: F811
    async with serving(folders) as (story, _):
        await dies_with(story, "a")
        await asyncio.wait([asyncio.create_task(story.replica._engine.watch())])
        assert (await story.replica.survey()).running == ()
        await story.replica.abort(["a"])
        await story.replica.give_up(["a"])
        with pytest.raises(EngineLostError):
            await story.until(lambda s: False)
