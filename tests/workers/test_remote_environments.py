"""Environments as a replica reaches them."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np

from laminar_py.link.turn_parts import TurnPartReceiver
from laminar_py.records.codec import decode, encode
from laminar_py.records.environment import EnvironmentTurn, ModelTurn, TurnPart
from laminar_py.relay.wire.post import peer_wire
from laminar_py.relay.wire.transport import RelayKeys
from laminar_py.workers import remote_environments
from laminar_py.workers.remote_environments import RemoteEnvironments
from tests.environment.turns import problem

KEYS = RelayKeys.generate()
WAY_S = 0.2


class FarActor:
    """A process of environments that is a fifth of a second away, and answers with what it was told."""

    def __init__(self):
        self.heard = asyncio.Queue()
        self.receiver = TurnPartReceiver(KEYS, "127.0.0.1")
        self.task = asyncio.create_task(self.receiver.run(self.heard.put_nowait))
        self.is_there = True

    async def ask(self, method, data):
        if method == "parts_address":
            if not self.is_there:
                await asyncio.Event().wait()
            return self.receiver.endpoint.encode()
        turn = decode(ModelTurn, data)
        await asyncio.sleep(WAY_S)
        return encode(EnvironmentTurn(ids=turn.response_ids, elapsed_s=0.01))


@asynccontextmanager
async def environments_in(monkeypatch, *actors):
    """Environments in these, as a replica has them."""
    named = {f"environment-{place}": actor for place, actor in enumerate(actors)}
    monkeypatch.setattr(remote_environments, "NamedActor", named.get)
    wire = peer_wire(KEYS)
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


async def test_the_time_of_an_answer_is_all_that_passed_until_it_was_here(monkeypatch):
    async with environments_in(monkeypatch, FarActor()) as environments:
        ids = np.array([7, 8], np.int32)
        turn = ModelTurn(trajectory_id="g0.0", problem=problem(1), response_ids=ids, spans=())
        answer = await environments.answer(turn)
        assert answer.ids.tolist() == [7, 8]
        assert answer.elapsed_s > 0.9 * WAY_S


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
