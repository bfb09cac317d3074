"""Cores that are shared: learner first, engines by what is left, and nobody gets more than there is."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_lab.emulation.engine import EmulatedEngine
from laminar_lab.emulation.responses import Responses
from laminar_lab.emulation.settings import EngineTimes
from laminar_lab.simulate.cores import SharedCores, divide_cores
from laminar_lab.simulate.run import simulate
from laminar_lab.simulate.virtual_loop import LoopClock, virtually
from laminar_py.config.loading import load_config
from laminar_py.records.engine import SamplingParams
from laminar_py.rollout.calibration import EngineBounds, TimedRequests
from tests.simulate.small import CONFIG, SMALL

TIMES = EngineTimes(step_s=0.01, kv_token_s=0.0, prefill_tokens_per_s=1e9, load_s=0.0, reserve_tokens=1)
STEPS = 100  # a second of an engine that has a core


@given(st.lists(st.sampled_from([1024.0, 110.0]), min_size=1, max_size=9), st.integers(1, 8))
def test_all_cores_are_used_and_none_twice(weights, cores):
    found = divide_cores(weights, cores)
    assert sum(found) == pytest.approx(min(cores, len(weights)))
    assert all(0 < share <= 1 for share in found)
    by_weight = [share for _, share in sorted(zip(weights, found, strict=True))]
    assert by_weight == pytest.approx(sorted(found)), "what is heavier has no less"


def test_a_learner_has_nearly_a_core_and_engines_share_the_other():
    learner, first, second = divide_cores([1024.0, 110.0, 110.0], 2)
    assert learner == 1.0
    assert first == second == 0.5


async def seconds(cores, *, engines, learner_s=0.0):
    """Times that engines of a second's work each, and work beside them, are done."""
    shared, clock, took = SharedCores(cores), LoopClock(), {}

    async def generate(index):
        engine = EmulatedEngine(
            TIMES,
            Responses(64, max_len=512, median=100, sigma=1.0),
            vocab=64,
            max_batch=1,
            max_len=512,
            kv_capacity=512,
            delta_interval_s=1e9,
            checksum=lambda folder: "",
            changed=shared.share_out,
        )
        await engine.start()
        shared.add_engine(engine)
        await engine.load_weights(None, 0)
        bounds = EngineBounds(
            vocab=64, slots=1, max_len=512, kv_capacity=512, sampling=SamplingParams(max_new_tokens=1)
        )
        await TimedRequests(engine, bounds, clock).batch(1, 8, STEPS)
        took[index] = clock.now()

    async def learn():
        await shared.compute(learner_s)
        took["learner"] = clock.now()

    await asyncio.gather(*(generate(index) for index in range(engines)), learn())
    return took


@pytest.mark.parametrize(("cores", "alone_s"), [(None, 1.0), (4, 1.0), (2, 1.5), (1, 3.0)])
def test_engines_that_have_fewer_cores_than_they_are_take_the_longer(cores, alone_s):
    took = virtually(seconds(cores, engines=3))
    assert [took[index] for index in range(3)] == pytest.approx([alone_s] * 3, abs=1e-4)


def test_engines_wait_for_the_learner_and_go_on_at_full_speed_after_it():
    took = virtually(seconds(2, engines=2, learner_s=1.0))
    assert took["learner"] == pytest.approx(1.0, abs=1e-4)
    assert [took[0], took[1]] == pytest.approx([1.5, 1.5], abs=1e-4)


def test_work_that_begins_while_other_work_goes_on_is_not_given_the_time_before_it():
    async def lead():
        shared, clock = SharedCores(2), LoopClock()
        first = asyncio.create_task(shared.compute(2.0))
        await asyncio.sleep(0.5)
        await shared.compute(1.0)
        ended_s = clock.now()
        await first
        return ended_s, clock.now()

    assert virtually(lead()) == pytest.approx((1.5, 2.0), abs=1e-6)


def test_a_run_on_few_cores_is_slower_and_one_on_many_is_as_without_a_bound():
    def rate(*settings):
        settings = [*SMALL, "repack.planner=none", *settings]
        return simulate(load_config(CONFIG, settings)).figures.trained_tokens_per_s

    free, many, few = rate(), rate("rollout.engine.simulation.cores=64"), rate("rollout.engine.simulation.cores=1")
    assert many == pytest.approx(free, rel=0.01), "but for the order of what happens at one moment"
    assert few < free / 2
    busy = rate("rollout.engine.simulation.cores=2", "rollout.engine.simulation.trajectory_cpu_s=0.01")
    assert busy < rate("rollout.engine.simulation.cores=2")
