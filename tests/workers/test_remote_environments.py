"""Environments as a replica reaches them."""

import asyncio

import numpy as np

from laminar_py.records.codec import decode, encode
from laminar_py.records.environment import EnvironmentTurn, ModelTurn
from laminar_py.workers.remote_environments import RemoteEnvironments
from tests.environment.turns import problem

WAY_S = 0.2


class FarActor:
    """A process of environments that is a fifth of a second away, and answers with what it was told."""

    async def ask(self, method, data):
        turn = decode(ModelTurn, data)
        await asyncio.sleep(WAY_S)
        return encode(EnvironmentTurn(ids=turn.response_ids, elapsed_s=0.01))


async def test_the_time_of_an_answer_is_all_that_passed_until_it_was_here():
    environments = RemoteEnvironments(["environment-0"])
    environments._actors = [FarActor()]
    ids = np.array([7, 8], np.int32)
    turn = ModelTurn(trajectory_id="g0.0", problem=problem(1), response_ids=ids, spans=())
    answer = await environments.answer(turn)
    assert answer.ids.tolist() == [7, 8]
    assert answer.elapsed_s > 0.9 * WAY_S
