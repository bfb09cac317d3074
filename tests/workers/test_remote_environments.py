"""Environments as a replica reaches them."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from laminar_py.records.codec import encode
from laminar_py.records.environment import EnvironmentTurn, ModelTurn, TurnPart
from laminar_py.relay.sockets import RelayKeys, peer_sockets
from laminar_py.runtime.link import turns
from laminar_py.runtime.link.turns import RemoteEnvironments, TurnReceiver
from tests.environment.turns import problem

KEYS = RelayKeys.generate()
WAY_S = 0.2


class FarActor:
    """A process of environments that is a fifth of a second away, and answers with what it was told."""

    def __init__(self):
        self.heard = asyncio.Queue()
        self.receiver = TurnReceiver(KEYS, "127.0.0.1")
        self.task = asyncio.create_task(self.receiver.run(self.heard.put_nowait))
        self.is_there = True

    async def call(self, method, argument=None):
        if method == "turns_address":
            if not self.is_there:
                await asyncio.Event().wait()
            return self.receiver.endpoint
        self.asked = argument
        await self.way()
        return encode(EnvironmentTurn(ids=self.asked.turn.response_ids, elapsed_s=0.01))

    async def way(self):
        await asyncio.sleep(WAY_S)


@asynccontextmanager
async def environments_in(monkeypatch, *actors):
    """Environments in these, as a replica has them."""
    named = {f"environment-{place}": actor for place, actor in enumerate(actors)}
    monkeypatch.setattr(turns, "NamedPart", named.get)
    wire = peer_sockets(KEYS)
    environments = RemoteEnvironments(list(named), wire, "replica-0")
    try:
        async with asyncio.timeout(30):
            yield environments
    finally:
        environments.close()
        wire.close()
        for actor in actors:
            actor.task.cancel()
        await asyncio.wait([actor.task for actor in actors])


def part(name):
    ids, logprobs = np.array([5], np.int32), np.zeros(1, np.float32)
    return TurnPart(trajectory_id=name, turn_start=0, place=0, ids=ids, logprobs=logprobs)


def asked(*ids):
    return ModelTurn(trajectory_id="g0.0", problem=problem(1), response_ids=np.array(ids, np.int32), spans=())


async def test_the_time_of_an_answer_is_all_that_passed_until_it_was_here(monkeypatch):
    async with environments_in(monkeypatch, FarActor()) as environments:
        answer = await environments.answer(asked(7, 8))
        assert answer.ids.tolist() == [7, 8]
        assert answer.elapsed_s > 0.9 * WAY_S


class BothActor(FarActor):
    """One whose answers are told by frames, too, after the calls have returned."""

    async def call(self, method, argument=None):
        answer = await super().call(method, argument)
        if method == "answer":
            late = EnvironmentTurn(ids=np.array([99], np.int32))
            asyncio.get_running_loop().call_later(0.05, self.receiver.answer, self.asked, late)
        return answer


class QuickActor(FarActor):
    """One whose answers are told by frames, with another before, and whose calls never return."""

    async def way(self):
        other = msgspec.structs.replace(self.asked, number=self.asked.number + 100)
        self.receiver.answer(other, EnvironmentTurn(ids=np.array([99], np.int32)))
        self.receiver.answer(self.asked, EnvironmentTurn(ids=self.asked.turn.response_ids))
        await asyncio.Event().wait()


@pytest.mark.parametrize("kind", [BothActor, QuickActor])
async def test_of_an_answer_the_first_word_counts_and_it_answers_what_was_asked(monkeypatch, kind):
    actor = kind()
    async with environments_in(monkeypatch, actor) as environments:
        environments.hear([part("g0.0")])
        await actor.heard.get()
        for number in range(3):
            assert (await environments.answer(asked(number))).ids.tolist() == [number]


async def test_who_waits_no_more_leaves_nothing_behind(monkeypatch):
    async with environments_in(monkeypatch, FarActor()) as environments:
        waiting = asyncio.create_task(environments.answer(asked(7)))
        await asyncio.sleep(WAY_S / 2)
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.sleep(0)
        assert environments._awaited == {}
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("ask-")]


async def test_one_that_fails_is_told_though_nothing_came_ahead(monkeypatch):
    actor = FarActor()
    actor.way = fail
    async with environments_in(monkeypatch, actor) as environments:
        with pytest.raises(ValueError, match="of its own"):
            await environments.answer(asked(7))


async def fail():
    raise ValueError("a mistake of its own")


async def test_each_process_hears_the_turns_of_its_own_trajectories(monkeypatch):
    actors = [FarActor(), FarActor()]
    async with environments_in(monkeypatch, *actors) as environments:
        names = [f"g{number}.0" for number in range(8)]
        for _ in range(2):  # by new connections, and by those
            environments.hear([part(name) for name in names])
            heard = [[one.trajectory_id for one in await actor.heard.get()] for actor in actors]
            assert sorted(name for mine in heard for name in mine) == names
            assert all(heard), "both have some"


async def test_a_process_that_is_away_holds_up_nobody_of_another(monkeypatch):
    actors = [FarActor(), FarActor()]
    async with environments_in(monkeypatch, *actors) as environments:
        names = [f"g{number}.0" for number in range(8)]
        away, there = actors
        away.is_there = False
        environments.hear([part(name) for name in names])
        heard = [one.trajectory_id for one in await there.heard.get()]
        assert heard, "of its own"
        assert away.heard.empty()
        away.is_there = True
