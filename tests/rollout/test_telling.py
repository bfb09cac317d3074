"""A replica whose engine tells of streams: what it hears it takes in, reports and stores as what a task reads."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from laminar_lab.emulation.engine import EmulatedEngine
from laminar_lab.emulation.responses import Responses
from laminar_lab.emulation.settings import EngineTimes
from laminar_lab.simulate.virtual_loop import LoopClock, virtually
from laminar_lab.simulate.weights import ModelledRelay, PulledWeights
from laminar_py.config.rollout import OnNewWeights
from laminar_py.records.engine import SamplingParams
from laminar_py.records.pieces import COUNTED, TokensRef
from laminar_py.records.trajectory import DropReason, FinishReason
from laminar_py.rollout.replica import Replica
from tests.events import make_assignment

TIMES = EngineTimes(step_s=0.02, kv_token_s=0.0, prefill_tokens_per_s=1e6, load_s=0.5, reserve_tokens=10)
MAX_LEN = 512


class Kept:
    """A store that counts, and knows who has left."""

    def __init__(self):
        self.pieces, self.forgotten = [], []

    def keep(self, piece):
        self.pieces.append(piece)
        return TokensRef(piece.start, piece.end, COUNTED)

    def journal(self, pieces):
        self.pieces += pieces

    def forget(self, trajectory_id):
        self.forgotten.append(trajectory_id)

    async def synced(self):
        pass

    async def keep_synced(self):
        await asyncio.Event().wait()


def mistaken(piece):
    raise TypeError("a mistake of our own")


def assignment(name, *, prompt=3):
    return make_assignment(
        name,
        group_id=name,
        prompt_ids=np.full(prompt, 3, np.int32),
        sampling=SamplingParams(max_new_tokens=400, stop_ids=(1,)),
    )


@asynccontextmanager
async def serving(*names, policy=OnNewWeights.DRAIN):
    """A replica that runs these, its task, its store, the relay of its weights and its engine."""
    responses = Responses(64, max_len=MAX_LEN, median=200, sigma=0.1)
    engine = EmulatedEngine(
        TIMES, responses, vocab=64, max_batch=8, max_len=MAX_LEN, kv_capacity=8 * MAX_LEN, checksum=lambda _: ""
    )
    await engine.start()
    relay, store = ModelledRelay(keep_versions=2), Kept()
    relay.receive_version(0)
    replica = Replica(
        0,
        engine=engine,
        weights=PulledWeights(relay, 0),
        store=store,
        clock=LoopClock(),
        on_new_weights=policy,
        batch=8,
        max_batch=8,
        partial_interval_s=1e9,
    )
    running = asyncio.create_task(replica.run())
    while not (await replica.next_report(1e9)).admissible:
        pass
    replica.start_assignments([assignment(name) for name in names])
    await asyncio.sleep(1.0)
    yield replica, running, store, relay, engine
    running.cancel()


async def ends(replica, count):
    """Ends of so many trajectories, by name."""
    found = {}
    while len(found) < count:
        report = await replica.next_report(1e9)
        found |= {one.trajectory_id: one for one in report.progress if one.finish_reason or one.failure}
    return found


def test_streams_need_no_task_and_every_token_is_told_once():
    async def lead():
        async with serving() as (replica, _, store, _, _):
            before = len(asyncio.all_tasks())
            replica.start_assignments([assignment(f"t{index}") for index in range(8)])
            await asyncio.sleep(1.0)
            assert len(asyncio.all_tasks()) == before
            ended = await ends(replica, 8)
            assert {one.finish_reason for one in ended.values()} == {FinishReason.STOP}
            assert all(one.spans[0].end == one.end > 50 for one in ended.values())
            assert sorted(store.forgotten) == sorted(ended)

    virtually(lead())


def test_whoever_gives_a_trajectory_up_has_its_last_words():
    async def lead():
        async with serving("a", "b") as (replica, _, store, _, _):
            await replica.give_up(["a"])
            assert store.forgotten == ["a"]
            ended = await ends(replica, 2)
            assert ended["a"].finish_reason is FinishReason.ABORT
            assert 0 < ended["a"].end < ended["b"].end

    virtually(lead())


def test_new_weights_interrupt_a_stream_and_it_goes_on():
    async def lead():
        async with serving("a", policy=OnNewWeights.RESUME) as (replica, _, _, relay, _):
            relay.receive_version(1)
            ended = await ends(replica, 1)
            assert ended["a"].finish_reason is FinishReason.STOP
            assert [span.version for span in ended["a"].spans] == [1]
            assert ended["a"].start > 0, "what came before was told as it broke off"

    virtually(lead())


def test_what_the_engine_refuses_costs_nobody_else():
    async def lead():
        async with serving("a") as (replica, _, _, _, _):
            replica.start_assignments([assignment("long", prompt=MAX_LEN + 1)])
            ended = await ends(replica, 2)
            assert ended["long"].failure is DropReason.REFUSED
            assert f"rollout.max_len={MAX_LEN}" in ended["long"].detail
            assert ended["a"].finish_reason is FinishReason.STOP

    virtually(lead())


def test_a_mistake_in_taking_in_what_is_heard_ends_the_replica():
    async def lead():
        async with serving("a") as (_, running, store, _, _):
            store.keep = mistaken
            await asyncio.wait([running])
            assert isinstance(running.exception().exceptions[0], TypeError)

    virtually(lead())


@pytest.mark.parametrize("how", ["ends", "is lost"])
def test_a_replica_that_is_over_hears_nothing_more(how):
    async def lead():
        async with serving("a") as (_, running, store, _, engine):
            running.cancel()
            await asyncio.wait([running])
            if how == "is lost":
                await engine.close()
            await asyncio.sleep(100.0)
            assert (store.pieces, store.forgotten) == ([], [])

    virtually(lead())
