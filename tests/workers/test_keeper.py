"""The life of a part: spawned where there is room, started, called, replaced, counted. Without processes."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from laminar_lab.simulate.virtual_loop import virtually
from laminar_py.records.events import PartCrashed, PartStarted
from laminar_py.runtime.cluster.errors import PartCrashedError, RunFailedError
from laminar_py.runtime.cluster.placement import NodeSlot
from laminar_py.runtime.workers.incarnation import Supervisor
from laminar_py.runtime.workers.keeper import Keeper
from tests.workers.fakes import Processes, make_incarnation

PATIENCE_S = 10.0
HERE = NodeSlot("node-0")


class Room:
    """A plan with a place for each of several parts, or none, as they are when it is made anew."""

    def __init__(self, *places):
        self.places = self.real = list(places)
        self.refreshed = asyncio.Event()

    async def refresh(self, *, age_s=0.0):
        await asyncio.sleep(0)
        self.places = self.real
        self.refreshed.set()


class Actor:
    """Serves until its process dies."""

    def pid(self):
        return 7

    async def serve(self):
        await asyncio.Event().wait()


class Life(Keeper):
    """A part of one process or several, whose starts fail as often as they should."""

    actor_class = Actor
    concurrency = 1
    timeout_s = 1.0

    def __init__(self, monkeypatch, *, fails=0, places=(HERE,), max_restarts=3, **attributes):
        self.processes = Processes(monkeypatch, lambda name: Actor())
        self.events, self.rests = [], []
        self._fails = fails
        self.served = asyncio.Queue()
        self.room = Room(*places)
        supervisor = Supervisor(record=self.events.append, max_restarts=max_restarts)
        incarnation = make_incarnation(placement=self.room, supervisor=supervisor)
        super().__init__(incarnation, *(f"part-{index}" for index in range(len(places))))
        for name, value in attributes.items():
            setattr(self, name, value)

    def places(self):
        return self.room.places

    async def start_parts(self, parts):
        if self._fails:
            self._fails -= 1
            raise PartCrashedError("part-0", "out of memory")

    async def watch(self, parts):
        self.served.put_nowait(parts)
        await asyncio.gather(*(part.call("serve") for part in parts))

    async def wait_before_restart(self, failures):
        self.rests.append(failures)


@asynccontextmanager
async def kept(life):
    async with asyncio.timeout(PATIENCE_S):
        task = asyncio.create_task(life.keep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_a_part_that_dies_is_ended_counted_and_replaced(monkeypatch):
    life = Life(monkeypatch)
    async with kept(life):
        (first,) = await life.served.get()
        first.die()
        (second,) = await life.served.get()
        assert second is not first
    assert life.events[:2] == [PartStarted("part-0", 7), PartCrashed("part-0", "killed")]
    assert life.rests == [0], "a death of what had served is no failed start"


async def test_processes_of_one_part_live_and_die_together(monkeypatch):
    life = Life(monkeypatch, places=(HERE, HERE))
    async with kept(life):
        first = await life.served.get()
        first[1].die()
        second = await life.served.get()
        assert [part.is_dead for part in (*first, *second)] == [True, True, False, False]
    assert [event for event in life.events if isinstance(event, PartCrashed)] == [PartCrashed("part-1", "killed")]


async def test_what_a_part_died_over_is_asked_of_the_next(monkeypatch):
    life, asked = Life(monkeypatch), []

    async def call(parts):
        asked.append(parts)
        if len(asked) == 1:
            raise PartCrashedError("part-0", "killed")
        return 42

    assert await life.call_with_restarts(call) == 42
    assert asked[0] != asked[1]


async def test_failed_starts_in_a_row_are_rested_for_ever_longer(monkeypatch):
    life = Life(monkeypatch, fails=3)
    async with asyncio.timeout(PATIENCE_S):
        await life.bring_up()
    assert life.rests == [1, 2, 3]
    assert [(await life.processes.next()).is_dead for _ in range(4)] == [True, True, True, False]


async def test_a_first_start_that_fails_too_often_ends_the_run(monkeypatch):
    life = Life(monkeypatch, fails=2, first_starts=2)
    with pytest.raises(RunFailedError, match=r"part-0 does not start: out of memory; see logs/part-0\.log"):
        await life.bring_up()


async def test_deaths_beyond_the_limit_end_the_run(monkeypatch):
    life = Life(monkeypatch, fails=9, max_restarts=3)
    with pytest.raises(RunFailedError, match=r"part-0 crashed 4 times.*supervisor\.max_restarts=3"):
        await life.bring_up()


async def test_a_death_on_purpose_is_not_counted(monkeypatch):
    async def on_purpose(error):
        return None

    life = Life(monkeypatch, clean_up=on_purpose, max_restarts=0)
    async with kept(life):
        (first,) = await life.served.get()
        first.die()
        await life.served.get()
    assert not [event for event in life.events if isinstance(event, PartCrashed)]


async def test_a_part_without_a_place_waits_until_there_is_one(monkeypatch):
    life = Life(monkeypatch, places=(None,))
    async with kept(life):
        await life.room.refreshed.wait()
        assert life.parts == ()
        life.room.real = [NodeSlot("node-1")]
        (part,) = await life.served.get()
    assert part.place == NodeSlot("node-1")


async def test_a_part_whose_node_goes_as_it_starts_comes_up_elsewhere(monkeypatch):
    starting = asyncio.Queue()

    async def start(parts):
        starting.put_nowait(parts)
        if parts[0].place == HERE:
            await parts[0].call("serve")

    life = Life(monkeypatch, start_parts=start)
    async with kept(life):
        (first,) = await starting.get()
        life.room.real = [NodeSlot("node-1")]
        first.die("its node is gone")
        (second,) = await life.served.get()
    assert second.place == NodeSlot("node-1")
    assert life.rests == [1]


async def test_a_part_whose_place_goes_in_the_rest_before_its_restart_waits_for_another(monkeypatch):
    async def wait_before_restart(failures):
        life.room.real = [None]
        life.room.refreshed.clear()
        rested.set()

    rested = asyncio.Event()
    life = Life(monkeypatch, wait_before_restart=wait_before_restart)
    async with kept(life):
        (first,) = await life.served.get()
        first.die()
        await rested.wait()
        await life.room.refreshed.wait()
        assert life.parts == ()
        life.room.real = [NodeSlot("node-1")]
        (second,) = await life.served.get()
    assert second.place == NodeSlot("node-1")


async def test_the_second_death_for_want_of_memory_ends_the_run_and_names_what_to_change(monkeypatch):
    async def start(parts):
        raise PartCrashedError(
            "part-0", "out of memory in step: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
        )

    life = Life(monkeypatch, start_parts=start, max_restarts=9, memory_advice="lower packer.max_tokens")
    told = r"part-0 ran out of memory twice, last: out of memory in step: .* 2.00 GiB; lower packer\.max_tokens"
    with pytest.raises(RunFailedError, match=told):
        await life.bring_up()
    assert sum(isinstance(event, PartCrashed) for event in life.events) == 2


STARVES = PartCrashedError("part-0", "out of memory in step")


def test_a_part_that_forgives_a_death_for_want_of_memory_does_so_after_its_time_of_health(monkeypatch):
    async def starve():
        life = Life(monkeypatch, max_restarts=9, memory_advice="lower packer.max_tokens", forgives_s=3600.0)
        await life.bring_up()
        await life.replace(STARVES)
        for _ in range(3):
            await life.bring_up()
            await asyncio.sleep(3600.0)
            await life.replace(STARVES)
        await life.bring_up()
        await asyncio.sleep(3599.0)
        with pytest.raises(RunFailedError, match="ran out of memory twice"):
            await life.replace(STARVES)

    virtually(starve())


def test_the_second_death_for_want_of_memory_ends_the_run_also_hours_after_the_first(monkeypatch):
    async def starve():
        life = Life(monkeypatch, max_restarts=9, memory_advice="lower packer.max_tokens")
        await life.bring_up()
        await asyncio.sleep(70 * 60.0)
        await life.replace(STARVES)
        await life.bring_up()
        await asyncio.sleep(70 * 60.0)
        with pytest.raises(RunFailedError, match="ran out of memory twice"):
            await life.replace(STARVES)

    virtually(starve())


async def test_a_part_whose_memory_no_setting_spares_dies_of_it_as_of_anything(monkeypatch):
    life = Life(monkeypatch, fails=3)
    async with asyncio.timeout(PATIENCE_S):
        await life.bring_up()
