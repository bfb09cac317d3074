"""Turns of emulated trajectories: the tokens of one turn in several, the same wherever and how often they run."""

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_lab.emulation.engine import EmulatedEngine
from laminar_lab.emulation.responses import EmulatedEnvironments, Responses, lay_out
from laminar_lab.emulation.scheduler import PrefixCache
from laminar_lab.emulation.settings import EngineTimes, TurnsConfig
from laminar_lab.simulate.fleet import CountedTokens
from laminar_lab.simulate.virtual_loop import LoopClock, virtually
from laminar_py.config.rollout import OnNewWeights
from laminar_py.records.engine import SamplingParams
from laminar_py.records.environment import ModelTurn, Problem
from laminar_py.records.pieces import COUNTED, TokensRef
from laminar_py.records.spans import Span, num_sampled, num_turns
from laminar_py.records.trajectory import FinishReason
from laminar_py.rollout.replica import Replica
from tests.emulation.test_engine import TICKETS, make_scheduler
from tests.engines.engine_conformance import make_request
from tests.events import make_assignment
from tests.rollout.folders import Folders

TURNS = TurnsConfig(count=4, median_s=2.0, p95_s=10.0, observation_tokens=7)
TIMES = EngineTimes(step_s=0.020, kv_token_s=8e-8, prefill_tokens_per_s=25_000.0, load_s=0.5, reserve_tokens=64)
LENGTHS = {"max_len": 3000, "median": 200.0, "sigma": 0.9, "seed": 5}
ONE, SEVERAL = Responses(123, **LENGTHS), Responses(123, **LENGTHS, turns=TURNS)
CAP = 600  # tokens of the model


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1), st.integers(1, 16), st.integers(0, 50))
def test_turns_divide_the_tokens_of_the_model_and_leave_the_environment_its_own(tokens, bits, count, gap):
    turns = lay_out(tokens, bits, count=count, gap=gap)
    assert len(turns) == min(count, tokens)
    assert sum(end - start for start, end in turns) == tokens
    assert all(end > start for start, end in turns)
    assert [b[0] - a[1] for a, b in pairwise(turns)] == [gap] * (len(turns) - 1)


def asked(seed, prefix=(), *, cap=CAP + TURNS.observed_tokens):
    return make_request("r", prompt=[3] * 50, prefix=prefix, length=cap, seed=seed, stop_ids=(1,))


@pytest.mark.parametrize("seed", range(40))
def test_the_model_has_as_many_tokens_as_in_one_turn_and_ends_alike(seed):
    alone, ends, length = ONE.respond(asked(seed, cap=CAP)), [], 0
    for turn in range(TURNS.count):
        planned = SEVERAL.respond(asked(seed, [5] * length))
        ends.append(planned.num_tokens)
        assert turn == TURNS.count - 1 or planned.reason is FinishReason.STOP
        length = planned.num_tokens + TURNS.observation_tokens
    assert (ends[-1] - TURNS.observed_tokens, planned.reason) == (alone.num_tokens, alone.reason)


def test_what_is_read_back_of_a_response_is_what_was_generated_whatever_part_of_it():
    ids, spans = SEVERAL.made(asked(3), 10_000)
    ends = [span.end for span in spans if span.version is not None]
    assert [i for i, id in enumerate(ids[: ends[-1]]) if id == 1] == [end - 1 for end in ends]
    for length in (0, 1, ends[0] - 1, ends[0], ends[0] + TURNS.observation_tokens, ends[1] + 3):
        part, of_part = SEVERAL.made(asked(3), length)
        assert part.tolist() == ids[:length].tolist()
        assert sum(span.end - span.start for span in of_part) == length


# ---- environments


def turn_after(name, done):
    spans = [Span(None if place % 2 else 1, 3 * place, 3 * place + 3) for place in range(2 * done - 1)]
    ids = np.zeros(3 * len(spans), np.int32)
    return ModelTurn(trajectory_id=name, problem=Problem(prompt=""), response_ids=ids, spans=tuple(spans))


def environments(*, seed=0, compression=1.0):
    return EmulatedEnvironments(TURNS, seed=seed, compression=compression)


def test_latencies_are_log_normal_and_a_matter_of_run_trajectory_and_turn():
    one = environments()
    seen = np.array([[one.latency_s(f"g{name}", turn) for turn in (1, 2, 3)] for name in range(3000)])
    assert np.percentile(seen, 50) == pytest.approx(2.0, rel=0.05)
    assert np.percentile(seen, 95) == pytest.approx(10.0, rel=0.07)
    assert abs(np.corrcoef(np.log(seen.T))[0, 1]) < 0.05
    assert environments().latency_s("g7", 2) == seen[7, 1] != environments(seed=1).latency_s("g7", 2)


def test_an_environment_begins_at_once_works_for_its_time_and_ends_after_the_last_turn():
    async def scenario():
        one, loop = environments(compression=4.0), asyncio.get_running_loop()
        first = await one.answer(turn_after("a", 0))
        assert (loop.time(), len(first.ids)) == (0.0, 0)
        second = await one.answer(turn_after("a", 1))
        assert loop.time() == pytest.approx(one.latency_s("a", 1) / 4.0) == second.elapsed_s
        assert len(second.ids) == TURNS.observation_tokens
        assert (await one.answer(turn_after("a", TURNS.count))).ends

    virtually(scenario())


def test_a_turn_that_is_asked_for_again_is_not_worked_on_anew():
    async def scenario():
        one, loop = environments(), asyncio.get_running_loop()
        left = asyncio.create_task(one.answer(turn_after("a", 1)))
        await asyncio.sleep(one.latency_s("a", 1) / 2)
        left.cancel()
        await one.answer(turn_after("a", 1))
        assert loop.time() == pytest.approx(one.latency_s("a", 1))
        await one.answer(turn_after("a", 1))
        assert loop.time() == pytest.approx(one.latency_s("a", 1)), "it has the answer"
        await one.forget("a")
        await one.answer(turn_after("a", 1))
        assert loop.time() == pytest.approx(2 * one.latency_s("a", 1))

    virtually(scenario())


# ---- the cache between turns


def prefilled_s(scheduler, now, rid, *, prefix):
    """Seconds until a request of one more token has it, on an engine whose steps take next to nothing."""
    request = make_request(rid, prompt=[3] * 1000, prefix=[4] * prefix, length=prefix + 1)
    scheduler.begin_call(now)
    scheduler.add_request(next(TICKETS), request)
    ends = {}
    while (due := scheduler.next_event_s) is not None:
        scheduler.advance(due)
        ends |= {delta.rid: due for _, delta in scheduler.take_deltas() if delta.finish_reason is not None}
    return ends[rid] - now


QUICK = TIMES.model_copy(update={"step_s": 1e-9, "kv_token_s": 0.0, "prefill_tokens_per_s": 1000.0})


def test_a_turn_that_comes_back_prefills_what_is_new_unless_its_prefix_had_to_go_or_is_of_older_weights():
    scheduler = make_scheduler(QUICK, kv_capacity=2100)
    assert prefilled_s(scheduler, 0.0, "a", prefix=0) == pytest.approx(1.0)
    assert prefilled_s(scheduler, 10.0, "a", prefix=8) == pytest.approx(0.007, abs=1e-6), "1 of 8 was generated"
    prefilled_s(scheduler, 20.0, "b", prefix=0)
    assert prefilled_s(scheduler, 30.0, "a", prefix=9) == pytest.approx(0.0, abs=1e-6), "there was room for both"
    prefilled_s(scheduler, 40.0, "c", prefix=0)
    assert prefilled_s(scheduler, 50.0, "a", prefix=10) == pytest.approx(0.0, abs=1e-6), "b was used longest ago"
    assert prefilled_s(scheduler, 60.0, "b", prefix=1) == pytest.approx(1.001)
    scheduler.begin_call(70.0)
    scheduler.begin_load(2)
    scheduler.end_load(2)
    assert prefilled_s(scheduler, 70.0, "b", prefix=2) == pytest.approx(1.002)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 50), st.integers(0, 100))))
def test_what_is_kept_is_never_more_than_there_is_room_for_and_the_longest_unused_goes_first(uses):
    cache, kept = PrefixCache(), {}
    for rid, tokens, room in uses:
        cache.keep(rid, tokens)
        kept.pop(rid, None)
        kept[rid] = tokens
        cache.shrink(room)
        while sum(kept.values()) > room:
            del kept[next(iter(kept))]
    assert {rid: cache.remove(rid) for rid in "abcdef"} == {rid: kept.get(rid, 0) for rid in "abcdef"}


# ---- trajectories on replicas


class KeptTokens(CountedTokens):
    """Tokens of a simulation, which stay."""

    def __init__(self):
        super().__init__(SEVERAL)
        self.ids = defaultdict(list)

    def keep(self, piece):
        assert piece.start == len(self.ids[piece.trajectory_id]), "every token once, in order"
        self.ids[piece.trajectory_id] += np.frombuffer(piece.ids, np.int32).tolist()
        return super().keep(piece)


def assignment(name, seed, *, told=0, version=None, epoch=1):
    sampling = SamplingParams(max_new_tokens=CAP + TURNS.observed_tokens, stop_ids=(1,), seed=seed)
    return make_assignment(
        name,
        epoch=epoch,
        group_id="g",
        prompt_ids=np.full(50, 3, np.int32),
        sampling=sampling,
        version=version,
        tokens=(TokensRef(0, told, COUNTED),) if told else (),
        problem=Problem(prompt="?"),
    )


class Told:
    """What replicas said of trajectories, in the order of the epochs."""

    def __init__(self):
        self.spans, self.ended, self.left = defaultdict(list), {}, {}
        self.admissible = 0

    async def hear(self, replica):
        while True:
            report = await replica.next_report(0.5)
            self.admissible = report.admissible
            for item in report.progress:
                self.spans[item.trajectory_id] += item.spans
                if item.finish_reason is FinishReason.ABORT:
                    self.left[item.trajectory_id] = item
                elif item.finish_reason is not None:
                    self.ended[item.trajectory_id] = item.finish_reason

    async def until(self, condition):
        while not condition():  # noqa: ASYNC110 - of an engine nobody is told
            await asyncio.sleep(0.05)

    async def until_heard_of(self, names):
        await self.until(lambda: set(names) <= {*self.left, *self.ended})


@asynccontextmanager
async def replica(store, told, work, weights, *, policy=OnNewWeights.DRAIN, compression=1.0):
    engine = EmulatedEngine(
        TIMES,
        SEVERAL,
        vocab=123,
        max_batch=8,
        max_len=3000,
        kv_capacity=30_000,
        compression=compression,
        delta_interval_s=0.3,
        checksum=lambda folder: "",
    )
    await engine.start()
    one = Replica(
        0,
        engine=engine,
        weights=weights,
        store=store,
        clock=LoopClock(),
        on_new_weights=policy,
        batch=8,
        max_batch=8,
        partial_interval_s=1.0,
        environments=work,
    )
    tasks = [asyncio.create_task(one.run()), asyncio.create_task(told.hear(one))]
    await told.until(lambda: engine.status().version >= 0)
    yield one
    for task in tasks:
        task.cancel()
    await engine.close()


NAMES = {f"t{seed}": seed for seed in range(6)}


async def undisturbed(compression=1.0):
    """Tokens of six trajectories, and how they ended, and how long that took."""
    store, told, weights = KeptTokens(), Told(), Folders(["/nowhere"])
    work = environments(compression=compression)
    async with replica(store, told, work, weights, compression=compression) as one:
        began = asyncio.get_running_loop().time()
        one.start_assignments([assignment(name, seed) for name, seed in NAMES.items()])
        await told.until(lambda: len(told.ended) == len(NAMES))
        return dict(store.ids), dict(told.ended), asyncio.get_running_loop().time() - began


def test_a_trajectory_is_as_many_turns_as_are_asked_for_and_waiting_ones_hold_no_slot():
    async def scenario():
        store, told, weights = KeptTokens(), Told(), Folders(["/nowhere"])
        async with replica(store, told, environments(), weights) as one:
            one.start_assignments([assignment("t0", 0)])
            await told.until(lambda: one.away)
            assert one.away == {"t0"}
            assert one._engine.status().running == one._engine.status().kv_used == 0
            await told.until(lambda: "t0" in told.ended)
            return told.spans["t0"]

    spans = virtually(scenario())
    assert num_turns(spans) == TURNS.count
    assert num_sampled(spans) == ONE.respond(asked(0, cap=CAP)).num_tokens


@pytest.mark.parametrize("every_s", [0.4, 1.1, 2.9])
def test_moves_between_replicas_change_no_token_wherever_they_come(every_s):
    async def scenario():
        store, told, weights = KeptTokens(), Told(), Folders(["/nowhere"])
        work, held, epochs = environments(), dict(NAMES), 1
        async with (
            replica(store, told, work, weights) as one,
            replica(store, told, work, weights) as other,
        ):
            one.start_assignments([assignment(name, seed) for name, seed in NAMES.items()])
            while len(told.ended) < len(NAMES):
                await asyncio.sleep(every_s)
                epochs += 1
                await one.give_up([*held])
                await told.until_heard_of(held)
                moved = [
                    assignment(n, s, told=len(store.ids[n]), epoch=epochs)
                    for n, s in held.items()
                    if n in told.left
                ]
                told.left.clear()
                other.start_assignments([msgspec.structs.replace(item, version=0) for item in moved])
                held = {item.trajectory_id: NAMES[item.trajectory_id] for item in moved}
                one, other = other, one
        return dict(store.ids), dict(told.ended), epochs

    ids, ended, epochs = virtually(scenario())
    assert epochs > 5
    assert (ids, ended) == virtually(undisturbed())[:2]


def test_new_weights_under_running_turns_change_no_token():
    async def scenario():
        store, told, weights = KeptTokens(), Told(), Folders(["/nowhere"])
        async with replica(store, told, environments(), weights, policy=OnNewWeights.RESUME) as one:
            one.start_assignments([assignment(name, seed) for name, seed in NAMES.items()])
            while len(told.ended) < len(NAMES):
                await asyncio.sleep(1.7)
                await weights.publish(weights.newest + 1)
        versions = {span.version for spans in told.spans.values() for span in spans if span.version is not None}
        return dict(store.ids), dict(told.ended), versions

    ids, ended, versions = virtually(scenario())
    assert len(versions) > 3
    assert (ids, ended) == virtually(undisturbed())[:2]


@pytest.mark.parametrize(("policy", "in_their_place"), [(OnNewWeights.RESUME, True), (OnNewWeights.DRAIN, False)])
def test_others_are_admitted_in_the_place_of_those_away_unless_a_version_gets_one_batch(policy, in_their_place):
    async def scenario():
        store, told, weights = KeptTokens(), Told(), Folders(["/nowhere"])
        async with replica(store, told, environments(), weights, policy=policy) as one:
            one.start_assignments([assignment(name, seed) for name, seed in NAMES.items()])
            await told.until(lambda: len(one.away) > 2)
            one.report_soon()
            await asyncio.sleep(0.1)
            return told.admissible, len(one.away), len(one._running)

    admissible, away, running = virtually(scenario())
    assert running == len(NAMES)
    assert admissible == (8 + 2 - running + away if in_their_place else 8 - running)


def test_real_time_gives_the_same_trajectories_as_virtual_time_and_is_no_faster():
    ids, ended, took_s = virtually(undisturbed())
    real_ids, real_ended, real_s = asyncio.run(undisturbed(compression=20.0))
    assert (real_ids, real_ended) == (ids, ended)
    assert 20.0 * real_s > took_s - 1.0
