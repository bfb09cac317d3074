"""The emulated engine: the laws of every engine that need no model, and its own about time, memory and lengths.

Everything runs in virtual time: a loop with nothing to do skips to its next timer.
"""

import asyncio
import itertools
import math
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from laminar_lab.emulation.engine import EmulatedEngine
from laminar_lab.emulation.responses import Responses
from laminar_lab.emulation.scheduler import EmulatedScheduler
from laminar_lab.emulation.settings import EngineTimes, read_profile
from laminar_lab.simulate.virtual_loop import virtually
from laminar_py.config.section import ConfigError
from laminar_py.records.engine import EngineLostError, PauseMode
from laminar_py.records.trajectory import FinishReason
from tests.depth import examples
from tests.engines import engine_conformance as conformance
from tests.engines.engine_conformance import Rig, caught, collect, make_request, until

PROFILE = Path(__file__).parents[2] / "configs/emulation/h100_7b.yaml"
VOCAB = 123
TIMES = EngineTimes(step_s=0.020, kv_token_s=8e-8, prefill_tokens_per_s=25_000.0, load_s=0.5, reserve_tokens=600)
QUICK = TIMES.model_copy(update={"load_s": 0.01})  # twenty loads while a stream of 1900 tokens runs

NEED_A_MODEL = {  # law: what of it cannot hold here
    conformance.every_token_has_the_version_that_made_it: "log-probabilities of a forward, other ones per version",
    conformance.log_probabilities_are_those_of_a_full_forward: "log-probabilities of a forward",
    conformance.a_retracted_token_is_of_the_version_that_it_names: "log-probabilities of a forward",
    conformance.a_released_token_is_of_the_version_that_it_names: "log-probabilities of a forward",
    conformance.a_token_on_an_old_kv_cache_says_so: "log-probabilities of a forward",
    conformance.a_request_that_comes_during_a_load_is_of_the_new_version: "log-probabilities of a forward",
    conformance.a_stop_id_ends_a_response_and_belongs_to_it: "a response ends where its seed says, not at a token",
}
LAWS = [law for law in conformance.LAWS if law not in NEED_A_MODEL]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Two versions of one tensor."""
    made = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    for value, folder in enumerate(made):
        save_file({"w": torch.full((4,), float(value))}, folder / "model.safetensors")
    return made


def make_engine(
    times=TIMES, *, max_batch=8, max_len=2048, kv_capacity=8 * 2048, median=300.0, sigma=0.9, **settings
) -> EmulatedEngine:
    responses = Responses(VOCAB, max_len=max_len, median=median, sigma=sigma)
    room = {"max_batch": max_batch, "max_len": max_len, "kv_capacity": kv_capacity}
    return EmulatedEngine(times, responses, vocab=VOCAB, delta_interval_s=0.1, **room, **settings)


@asynccontextmanager
async def serving(folder: Path, times=TIMES, **room):
    """A started engine that serves `folder` as version 1."""
    engine = make_engine(times, **room)
    await engine.start()
    await engine.load_weights(folder, 1)
    yield engine
    await engine.close()


def make_scheduler(times=TIMES, *, max_batch=8, kv_capacity=100_000) -> EmulatedScheduler:
    """It serves version 1 from time 0 on."""
    room = {"max_batch": max_batch, "max_len": 20_000, "kv_capacity": kv_capacity}
    scheduler = EmulatedScheduler(times, RESPONSES, **room)
    scheduler.begin_call(0.0)
    scheduler.begin_load(1)
    scheduler.end_load(1)
    return scheduler


RESPONSES = Responses(VOCAB, max_len=20_000, median=300.0, sigma=0.9)
TICKETS = itertools.count()


def submit(scheduler, now, rid, **request):
    scheduler.begin_call(now)
    scheduler.add_request(next(TICKETS), make_request(rid, **request))


def run_out(scheduler) -> dict[str, float]:
    """When each request ended, in order."""
    ends = {}
    while (due := scheduler.next_event_s) is not None:
        scheduler.advance(due)
        status = scheduler.status()
        assert status.kv_used <= status.kv_capacity
        ends |= {delta.rid: due for _, delta in scheduler.take_deltas() if delta.finish_reason is not None}
    return ends


def stopped_length(seed: int, *, cap: int = 15_000) -> int:
    request = make_request(length=cap, seed=seed, stop_ids=(1,))
    return RESPONSES.respond(request).num_tokens


# ---- every engine's laws


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_emulated_engine_keeps_the_law(law, folders):
    @asynccontextmanager
    async def make():
        async with serving(folders[0], QUICK) as engine:
            yield Rig(engine, folders, VOCAB, 8, 2048)

    virtually(law(make))


def test_a_lost_engine_says_so_in_every_method(folders):
    @asynccontextmanager
    async def make():
        async with serving(folders[0], QUICK) as engine:
            yield Rig(engine, folders, VOCAB, 8, 2048)

    def kill(engine):
        engine._scheduler.advance = lambda now: 1 / 0

    virtually(conformance.a_lost_engine_says_so_in_every_method(make, kill))


def test_versions_of_tokens_and_of_their_kv_cache_are_told(folders):
    async def spans(mode):
        async with serving(folders[0]) as engine:
            request = await caught(engine, make_request(length=600))
            await engine.pause(mode)
            await engine.load_weights(folders[1], 2)
            await engine.resume()
            response = await request.response()
            return set(zip(response.versions, response.kv_versions, strict=True))

    assert virtually(spans(PauseMode.RETRACT)) == {(1, None), (2, None)}
    assert virtually(spans(PauseMode.IN_PLACE)) == {(1, None), (2, 1)}


def test_a_request_during_a_load_runs_under_the_new_version(folders):
    async def scenario():
        async with serving(folders[0]) as engine:
            loading = asyncio.create_task(engine.load_weights(folders[1], 2))
            await asyncio.sleep(0)
            response = await collect(engine, make_request())
            await loading
            return response.versions

    assert virtually(scenario()) == [2] * 20


# ---- time


@given(
    running=st.integers(1, 64),
    kv_used=st.integers(0, 120_000),
    steps=st.integers(0, 400),
    kv_token_s=st.sampled_from([0.0, 8e-8, 1e-3]),
    sequence_s=st.sampled_from([0.0, 8e-6]),
)
@settings(deadline=None)
def test_the_formula_is_the_sum_of_its_steps_and_its_inverse_agrees(
    running, kv_used, steps, kv_token_s, sequence_s
):
    times = TIMES.model_copy(update={"kv_token_s": kv_token_s, "sequence_s": sequence_s})
    first_s = times.step_s + sequence_s * running
    each = [first_s + kv_token_s * (kv_used + running * step) for step in range(steps + 1)]
    total = times.seconds(steps, running=running, kv_used=kv_used)
    assert total == pytest.approx(math.fsum(each[:steps]), rel=1e-9)
    assert times.steps_within(total, running=running, kv_used=kv_used) == steps
    almost = total + 0.999 * each[steps]
    assert times.steps_within(almost, running=running, kv_used=kv_used) == steps


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    looks=st.lists(st.floats(0, 60), max_size=30),
    kv_capacity=st.sampled_from([1_000, 2_000, 100_000]),
)
@settings(deadline=None, max_examples=examples(60))
def test_looking_at_it_changes_nothing(lengths, looks, kv_capacity):
    watched, alone = (make_scheduler(max_batch=6, kv_capacity=kv_capacity) for _ in range(2))
    for index, length in enumerate(lengths):
        for scheduler in (watched, alone):
            submit(scheduler, 0.0, f"r{index}", length=length)
    ends = {}
    for look in sorted(looks):
        watched.advance(look)
        assert watched.status().kv_used <= kv_capacity
        ends |= {delta.rid: look for _, delta in watched.take_deltas() if delta.finish_reason is not None}
    expected, rest = run_out(alone), run_out(watched)
    assert rest == pytest.approx({rid: expected[rid] for rid in rest}, rel=1e-9)
    for rid, seen in ends.items():
        assert expected[rid] <= seen * (1 + 1e-9), "nobody sees an end before it is"
    assert set(ends) | set(rest) == set(expected)


def test_a_response_takes_its_prefill_and_its_steps():
    scheduler = make_scheduler()
    submit(scheduler, 1.0, "r", prompt=[3] * 500, length=100)
    takes_s = 500 / 25_000 + 100 * 0.020 + 8e-8 * (100 * 500 + 4950)
    assert run_out(scheduler) == {"r": pytest.approx(1.0 + takes_s)}
    assert scheduler.busy_s == pytest.approx(takes_s), "it had nothing to do before"


def test_the_first_token_is_delivered_after_one_step(folders):
    async def scenario():
        async with serving(folders[0]) as engine:
            loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
            async with aclosing(engine.generate(make_request(prompt=[3] * 250, length=100))) as stream:
                return len((await anext(stream)).ids), loop.time() - began

    assert virtually(scenario()) == (1, pytest.approx(0.01 + 0.020 + 250 * 8e-8))


def test_a_prefill_holds_up_what_runs():
    scheduler = make_scheduler(TIMES.model_copy(update={"kv_token_s": 0.0}))
    submit(scheduler, 0.0, "first", prompt=[3] * 250, length=100)
    submit(scheduler, 1.015, "second", prompt=[3] * 250, length=100)
    ends = run_out(scheduler)
    assert ends["first"] == pytest.approx(0.01 + 100 * 0.020 + 0.01)
    assert ends["second"] == pytest.approx(1.03 + 0.01 + 100 * 0.020), "it waits for the end of the step"


def test_members_of_a_group_share_the_prefill_of_their_prompt():
    def prefill_s(group):
        scheduler = make_scheduler(TIMES.model_copy(update={"step_s": 1e-9, "kv_token_s": 0.0}))
        for index in range(4):
            submit(scheduler, 0.0, f"r{index}", group=group(index), prompt=[3] * 250, length=10)
        return max(run_out(scheduler).values())

    assert prefill_s(lambda index: "g") == pytest.approx(0.01, abs=1e-6)
    assert prefill_s(lambda index: f"g{index}") == pytest.approx(0.04, abs=1e-6)


def test_a_continued_request_pays_for_its_prefix_and_comes_before_fresh_ones():
    scheduler = make_scheduler(TIMES.model_copy(update={"step_s": 1e-9, "kv_token_s": 0.0}), max_batch=1)
    submit(scheduler, 0.0, "running", prompt=[3] * 250, length=10)
    submit(scheduler, 0.0, "fresh", prompt=[3] * 250, length=10)
    submit(scheduler, 0.0, "continued", prompt=[3] * 250, prefix=[4] * 500, length=510)
    ends = run_out(scheduler)
    assert list(ends) == ["running", "continued", "fresh"]
    assert ends["continued"] - ends["running"] == pytest.approx(0.03, abs=1e-6)


def test_a_load_takes_its_time_and_compression_divides_all_times(folders):
    async def elapsed(compression):
        async with serving(folders[0], compression=compression) as engine:
            await collect(engine, make_request(length=1000))
            return asyncio.get_running_loop().time()

    plain = virtually(elapsed(1.0))
    expected = 0.5 + 3 / 25_000 + 1000 * 0.020 + 8e-8 * (1000 * 3 + 1000 * 999 / 2)
    assert plain == pytest.approx(expected)
    assert virtually(elapsed(20.0)) == pytest.approx(plain / 20)


def test_a_timer_that_fires_late_moves_no_event(folders):
    async def scenario():
        async with serving(folders[0], max_batch=1) as engine:
            first = asyncio.create_task(collect(engine, make_request("a", length=100)))
            second = asyncio.create_task(collect(engine, make_request("b", length=100)))
            await until(lambda: engine.status().waiting == 1)
            asyncio.get_running_loop().skip(3.0)  # the machine was busy
            left = engine.status()
            assert (left.running, left.waiting) == (1, 0)
            assert left.kv_used == pytest.approx(3 + 50, abs=2), "the second began when the first ended, at 2 s"
            return await first, await second

    for response in virtually(scenario()):
        assert len(response.ids) == 100


def test_two_engines_in_one_loop_take_no_longer_than_one(folders):
    async def both():
        async with serving(folders[0]) as one, serving(folders[0]) as other:
            began = asyncio.get_running_loop().time()
            answers = await asyncio.gather(*(collect(engine, make_request(length=500)) for engine in (one, other)))
            return asyncio.get_running_loop().time() - began, [len(answer.ids) for answer in answers]

    seconds, lengths = virtually(both())
    assert lengths == [500, 500]
    assert seconds == pytest.approx(3 / 25_000 + 500 * 0.020 + 8e-8 * (500 * 3 + 500 * 499 / 2))


# ---- memory


def test_a_full_cache_retracts_the_youngest_which_goes_on_first():
    scheduler = make_scheduler(TIMES.model_copy(update={"reserve_tokens": 16}), kv_capacity=1_000)
    for index in range(3):
        submit(scheduler, 0.0, f"r{index}", prompt=[3], length=450)
    submit(scheduler, 0.0, "late", prompt=[3], length=10)
    lowest = 4
    ends = {}
    while (due := scheduler.next_event_s) is not None:
        scheduler.advance(due)
        lowest = min(lowest, scheduler.status().running)
        ends |= {delta.rid: due for _, delta in scheduler.take_deltas() if delta.finish_reason is not None}
    assert lowest < 3, "some were retracted"
    assert list(ends)[:3] == ["late", "r0", "r1"]
    assert ends["r2"] > ends["r1"]


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 99), st.integers(1, 700), st.integers(0, 300), st.floats(0, 20)), max_size=40
    )
)
@settings(deadline=None, max_examples=examples(60))
def test_the_cache_and_the_batch_are_never_overfull_and_everything_ends(requests):
    scheduler = make_scheduler(max_batch=5, kv_capacity=1_500)
    for index, (group, length, prefix, now) in enumerate(sorted(requests, key=lambda request: request[3])):
        submit(scheduler, now, f"r{index}", group=f"g{group}", length=length, prefix=[4] * prefix)
        assert scheduler.status().running <= 5
        assert scheduler.status().kv_used <= 1_500
    ended = {delta.rid for _, delta in scheduler.take_deltas() if delta.finish_reason is not None}
    assert len(ended | set(run_out(scheduler))) == len(requests)
    assert scheduler.status().kv_used == scheduler.status().running == scheduler.status().waiting == 0


# ---- responses


def test_lengths_are_log_normal_and_cut_at_the_cap():
    lengths = np.array([stopped_length(seed) for seed in range(4_000)])
    assert np.median(lengths) == pytest.approx(300, rel=0.06)
    assert np.log(lengths).std() == pytest.approx(0.9, rel=0.06)
    assert lengths.min() >= 16
    assert stopped_length(int(lengths.argmax()), cap=50) == 50


def test_responses_to_a_prompt_are_alike_in_length_by_its_share_of_the_variance():
    responses = Responses(VOCAB, max_len=20_000, median=300.0, sigma=0.9, prompt_share=0.8)
    asked = [
        [make_request(length=15_000, seed=9 * group + seed, group=f"g{group}", stop_ids=(1,)) for seed in range(8)]
        for group in range(1_000)
    ]
    lengths = np.log([[responses.respond(request).num_tokens for request in group] for group in asked])
    assert lengths.std() == pytest.approx(0.9, rel=0.06)
    assert lengths.mean(axis=1).var() == pytest.approx(0.81 * (0.8 + 0.2 / 8), rel=0.1)


def test_lengths_of_a_prompt_are_drawn_by_the_runs_seed_its_group_and_itself():
    def length(run, **request):
        responses = Responses(VOCAB, max_len=20_000, median=300.0, sigma=0.9, prompt_share=1.0, seed=run)
        return responses.respond(make_request(length=15_000, stop_ids=(1,), **request)).num_tokens

    same = length(0, group="g0", prompt=[3, 4], seed=1)
    assert length(0, group="g0", prompt=[3, 4], seed=2) == same
    others = {length(1, group="g0", prompt=[3, 4]), length(0, group="g1", prompt=[3, 4])}
    others.add(length(0, group="g0", prompt=[3, 5]))
    assert len(others | {same}) == 4


def test_only_the_last_token_of_a_response_that_stops_is_a_stop_id(folders):
    async def scenario():
        async with serving(folders[0]) as engine:
            return [
                await collect(engine, make_request(length=2000, seed=seed, stop_ids=(5, 6))) for seed in range(40)
            ]

    for response in virtually(scenario()):
        assert response.reason is FinishReason.STOP
        assert response.ids[-1] == 5
        assert {5, 6}.isdisjoint(response.ids[:-1])
        assert 0 <= min(response.ids) <= max(response.ids) < VOCAB


def test_interruption_and_migration_change_neither_length_nor_tokens(folders):
    async def scenario():
        request = {"length": 2000, "seed": 7, "stop_ids": (5,)}
        async with serving(folders[0]) as source, serving(folders[0]) as destination:
            whole = await collect(source, make_request("whole", **request))
            moved = await caught(source, make_request("moved", **request))
            await source.pause(PauseMode.ABORT)
            first = await moved.response()
            rest = await collect(destination, make_request("moved", prefix=first.ids, **request))
            return whole, first, rest

    whole, first, rest = virtually(scenario())
    assert first.reason is FinishReason.ABORT
    assert first.ids
    assert rest.ids
    assert first.ids + rest.ids == whole.ids
    assert rest.reason is whole.reason is FinishReason.STOP


# ---- what it refuses


def test_weights_that_cannot_be_read_are_refused_and_the_old_ones_stay(folders, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"torn")

    async def scenario():
        async with serving(folders[0]) as engine:
            with pytest.raises(ValueError, match="cannot be read"):
                await engine.load_weights(tmp_path, 2)
            return (await collect(engine, make_request())).versions

    assert virtually(scenario()) == [1] * 20


def test_a_closed_engine_is_lost(folders):
    async def scenario():
        async with serving(folders[0]) as engine:
            watching = asyncio.create_task(engine.watch())
            request = await caught(engine, make_request(length=1000))
        assert (await request.response()).reason is FinishReason.ABORT
        with pytest.raises(EngineLostError):
            await watching
        with pytest.raises(EngineLostError):
            await collect(engine, make_request())

    virtually(scenario())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "engine"),
        (PROFILE.read_text().replace("step_s: 0.020", "step_s: 0"), "engine.step_s=0"),
        (PROFILE.read_text() + "gpus: 8\n", "gpus=8: unknown key"),
    ],
    ids=["empty", "zero", "unknown"],
)
def test_a_bad_profile_is_refused_in_one_line(text, line, tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text(text or "{}")
    with pytest.raises(ConfigError, match=rf"^rollout\.engine\.profile={path}: .*{line}") as caught_error:
        read_profile(path)
    assert "\n" not in str(caught_error.value)


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "tokens_per_s"),
    [
        ("7b_tp1", 1, 64, 5_654),
        ("32b_tp2", 2, 64, 1_231),
        ("32b_tp4", 4, 64, 1_079),
        ("32b_tp4", 4, 128, 1_500),
        ("72b_tp4", 4, 64, 633),
        ("72b_tp8", 8, 64, 525),
        ("72b_tp8", 8, 256, 1_039),
    ],
)
def test_profiles_of_published_tables_decode_at_their_speed(name, gpus, batch, tokens_per_s):
    """Tokens/s of a GPU at contexts of 4,096 tokens, from the tables that the profiles were fitted to."""
    times = read_profile(Path(f"configs/emulation/h100_{name}.yaml")).engine
    step_s = times.seconds(1, running=batch, kv_used=4096 * batch)
    assert batch / step_s / gpus == pytest.approx(tokens_per_s, rel=0.05)


def test_a_missing_profile_is_named():
    with pytest.raises(ConfigError, match=r"rollout\.engine\.profile=nowhere\.yaml: no such file"):
        read_profile(Path("nowhere.yaml"))


# ---- memory that a learner on the same GPU takes


def pause_and_go_on(mode, *, queued=0) -> EmulatedScheduler:
    """Run two requests, pause them after 5 s, and resume them 5 s later, with other requests then."""
    scheduler = make_scheduler()
    for index in range(2):
        submit(scheduler, 0.0, f"r{index}", prefix=[7] * 100, length=900)
    scheduler.begin_call(5.0)
    scheduler.pause(mode)
    scheduler.take_deltas()
    for index in range(queued):
        submit(scheduler, 7.0, f"queued{index}", length=900)
    scheduler.begin_call(10.0)
    scheduler.resume()
    return scheduler


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.RELEASE])
def test_a_dropped_cache_costs_the_prefill_of_all_of_its_tokens(mode):
    scheduler = pause_and_go_on(mode)
    cached = scheduler.kv_used
    assert cached > 2 * (3 + 100 + 200), "prompts, prefixes, and about 240 tokens of each"
    assert scheduler.recomputed_s == pytest.approx(cached / TIMES.prefill_tokens_per_s, rel=0.02)
    assert pause_and_go_on(PauseMode.IN_PLACE).recomputed_s == 0.0


def test_released_memory_held_the_caches_of_ended_turns_too():
    def tokens_prefilled(mode):
        scheduler = make_scheduler()
        submit(scheduler, 0.0, "a", length=300)
        run_out(scheduler)
        scheduler.begin_call(50.0)
        scheduler.pause(mode)
        scheduler.resume()
        before = scheduler.busy_s
        submit(scheduler, 60.0, "a", length=300)
        run_out(scheduler)
        return scheduler.busy_s - before

    assert tokens_prefilled(PauseMode.RELEASE) > tokens_prefilled(PauseMode.IN_PLACE)


def test_memory_takes_its_time_to_go_and_to_come_back(folders):
    async def seconds(*modes):
        async with serving(folders[0], compression=2.0) as engine:
            loop = asyncio.get_running_loop()
            began = loop.time()
            for mode in modes:
                await engine.pause(mode)
            paused = loop.time()
            await engine.resume()
            return paused - began, loop.time() - paused

    for modes in ((PauseMode.RELEASE,), (PauseMode.RELEASE, PauseMode.ABORT)):
        assert virtually(seconds(*modes)) == pytest.approx((TIMES.hand_over_s / 2,) * 2)
    assert virtually(seconds(PauseMode.RETRACT)) == (0.0, 0.0)


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RELEASE])
@pytest.mark.parametrize("others", [0, 1])  # that were queued in the pause, and are admitted first
def test_resumed_requests_send_their_next_tokens_at_once(mode, others):
    scheduler = pause_and_go_on(mode, queued=others)
    told = set()
    while scheduler.next_event_s < 10.1:
        scheduler.advance(scheduler.next_event_s)
        told |= {delta.rid for _, delta in scheduler.take_deltas()}
    assert told >= {"r0", "r1"}
