"""The life of a part: spawned where there is room, started, watched, replaced, counted. Without processes."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from laminar_py.cluster.errors import PartDiedError, RunFailedError
from laminar_py.cluster.placement import Place
from laminar_py.records.events import PartDied, PartStarted
from laminar_py.workers import keeper as keeper_module
from laminar_py.workers.keeper import Keeper, Kept
from laminar_py.workers.site import Site
from laminar_py.workers.supervisor import Supervisor

PATIENCE_S = 10.0
HERE = Place("node-0")


class Process:
    """Stands for `cluster.part.Part`."""

    def __init__(self, name, kind, *, concurrency, timeout_s, place):
        self.name, self.place, self.killed = name, place, False

    def kill(self):
        self.killed = True


class Room:
    """A plan with a place, or none, that counts how often it was looked at again."""

    def __init__(self, place=HERE):
        self.place, self.refreshed = place, asyncio.Event()

    def refresh(self):
        self.refreshed.set()


class Life:
    """A part whose starts fail as often as they should, and which dies when it is told to."""

    def __init__(self, monkeypatch, *, fails=0, place=HERE, max_restarts=3, **kept):
        monkeypatch.setattr(keeper_module, "Part", Process)
        monkeypatch.setattr(keeper_module, "RETRY_S", 0.0)
        self.events, self.rests, self.spawned = [], [], []
        self._fails = fails
        self._deaths = asyncio.Queue()
        self.started = asyncio.Queue()
        self.room = Room(place)
        self.keeper = Keeper(
            Kept(
                names=["part-0"],
                actor=object,
                concurrency=1,
                timeout_s=1.0,
                places=lambda: None if self.room.place is None else [self.room.place],
                start=self.start,
                watch=self.watch,
                rest=self.rest,
                **kept,
            ),
            Site(
                config=None,
                run=None,
                placement=self.room,
                supervisor=Supervisor(record=self.events.append, max_restarts=max_restarts),
            ),
        )

    async def start(self, parts):
        self.spawned += parts
        if self._fails:
            self._fails -= 1
            raise PartDiedError("part-0", "no memory")
        self.started.put_nowait(parts)
        return [7]

    async def watch(self, parts):
        raise await self._deaths.get()

    async def rest(self, failures):
        self.rests.append(failures)

    def die(self):
        self._deaths.put_nowait(PartDiedError("part-0", "killed"))


@asynccontextmanager
async def kept(life):
    async with asyncio.timeout(PATIENCE_S):
        task = asyncio.create_task(life.keeper.keep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_a_part_that_dies_is_ended_counted_and_replaced(monkeypatch):
    life = Life(monkeypatch)
    async with kept(life):
        (first,) = await life.started.get()
        life.die()
        (second,) = await life.started.get()
        assert first.killed
        assert second is not first
    assert life.events[:2] == [PartStarted("part-0", 7), PartDied("part-0", "killed")]
    assert life.rests == [0], "a death of what had served is no failed start"


async def test_failed_starts_in_a_row_are_rested_for_ever_longer(monkeypatch):
    life = Life(monkeypatch, fails=3)
    async with asyncio.timeout(PATIENCE_S):
        await life.keeper.up()
    assert life.rests == [1, 2, 3]
    assert len(life.spawned) == 4


async def test_a_first_start_that_fails_too_often_ends_the_run(monkeypatch):
    life = Life(monkeypatch, fails=2, first_starts=2)
    with pytest.raises(RunFailedError, match=r"part-0 does not start: no memory; see logs/part-0\.log"):
        await life.keeper.up()


async def test_deaths_beyond_the_limit_end_the_run(monkeypatch):
    life = Life(monkeypatch, fails=9, max_restarts=3)
    with pytest.raises(RunFailedError, match=r"part-0 died 4 times.*supervisor\.max_restarts=3"):
        await life.keeper.up()


async def test_a_death_on_purpose_is_not_counted(monkeypatch):
    async def on_purpose(error):
        return None

    life = Life(monkeypatch, lost=on_purpose, max_restarts=0)
    async with kept(life):
        await life.started.get()
        life.die()
        await life.started.get()
    assert PartDied("part-0", "killed") not in life.events


async def test_a_part_without_a_place_waits_until_there_is_one(monkeypatch):
    life = Life(monkeypatch, place=None)
    async with kept(life):
        await life.room.refreshed.wait()
        assert life.spawned == []
        life.room.place = Place("node-1")
        (part,) = await life.started.get()
    assert part.place == Place("node-1")
