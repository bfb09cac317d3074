"""The process of environments, as replicas call it."""

import asyncio

import numpy as np
import pytest

from laminar_py.records.environment import EnvironmentTurn, ModelTurn
from laminar_py.runtime.link.turns import AskedTurn
from laminar_py.runtime.workers.processes.environment import EnvironmentActor
from tests.environment.turns import problem


class Told:
    """Takes the place of the socket by which replicas are told."""

    def __init__(self):
        self.answers = []

    def answer(self, asked, turn):
        self.answers.append((asked.asker, asked.number, turn.ids.tolist()))


class Answering:
    """Environments that answer with what was said last."""

    def __init__(self, *, listens):
        self._listens = listens

    async def answer(self, turn):
        return EnvironmentTurn(ids=turn.response_ids[-1:], listens=self._listens)


@pytest.mark.parametrize("listens", [True, False], ids=["listens", "does-not"])
async def test_an_answer_is_told_by_a_frame_where_the_environment_listens(listens):
    actor = EnvironmentActor()
    actor._receiver, actor._host = Told(), Answering(listens=listens)
    turn = ModelTurn(trajectory_id="g0.0", problem=problem(1), response_ids=np.array([7, 8], np.int32), spans=())
    asking = asyncio.create_task(actor.answer(AskedTurn(asker="replica-0-1-1", number=3, turn=turn)))
    await asyncio.sleep(0)
    assert not actor._receiver.answers, "it is not ready"
    actor._ready.set()
    assert (await asking).ids.tolist() == [8]
    assert actor._receiver.answers == ([("replica-0-1-1", 3, [8])] if listens else [])
