"""Times of an engine: those that an emulated one was given are those that are found."""

import pytest

from laminar_lab.calibration.engine import choose_shapes, measure_engine
from laminar_lab.emulation.engine import EmulatedEngine
from laminar_lab.emulation.responses import Responses
from laminar_lab.emulation.settings import EngineTimes
from laminar_lab.simulate.virtual_loop import LoopClock, virtually
from laminar_py.config.section import ConfigError
from laminar_py.records.engine import SamplingParams
from laminar_py.rollout.calibration import EngineBounds, measure_speed

SAMPLING = SamplingParams(max_new_tokens=1)


def bounds(**changes):
    given = {"vocab": 64, "slots": 32, "max_len": 1024, "kv_capacity": 32 * 1024, "sampling": SAMPLING}
    return EngineBounds(**{**given, **changes})


async def start_engine(times, limits):
    engine = EmulatedEngine(
        times,
        Responses(limits.vocab, max_len=limits.max_len, median=100, sigma=1.0),
        vocab=limits.vocab,
        max_batch=limits.slots,
        max_len=limits.max_len,
        kv_capacity=limits.kv_capacity,
        checksum=lambda folder: "",
    )
    await engine.start()
    return engine


def measured(times, tmp_path, **changes):
    limits = bounds(**changes)

    async def lead():
        engine = await start_engine(times, limits)
        return await measure_engine(
            engine,
            limits,
            LoopClock(),
            weights=tmp_path,
            reserve_tokens=times.reserve_tokens,
            gpus=times.gpus,
            repeats=1,
            log=lambda line: None,
        )

    return virtually(lead())


@pytest.mark.parametrize("sequence_s", [0.0, 3e-5])
def test_what_an_emulated_engine_was_given_is_what_is_found(sequence_s, tmp_path):
    given = EngineTimes(
        step_s=0.02,
        sequence_s=sequence_s,
        kv_token_s=8e-8,
        prefill_tokens_per_s=25000,
        load_s=0.5,
        reserve_tokens=16,
    )
    found = measured(given, tmp_path)
    known = given.model_dump(exclude_none=True)
    assert found.times.model_dump(exclude_none=True) == pytest.approx(known, rel=1e-6, abs=1e-12)
    assert found.steps.worst_error < 1e-6


def test_batches_keep_what_the_cache_holds_and_a_length_at_which_nothing_fits_is_refused():
    small = bounds(kv_capacity=4096)
    shapes = choose_shapes(small)
    assert len({shape.sequences for shape in shapes}) == 4
    assert all(shape.sequences * (shape.prompt + 80) <= 4096 for shape in shapes)
    with pytest.raises(ConfigError, match=r"rollout\.max_len=64: leaves no room"):
        choose_shapes(bounds(max_len=64))


@pytest.mark.parametrize(("slowness", "within_s"), [(1.0, 15.0), (6.0, 15.0), (30.0, 60.0)])
def test_the_speed_for_repacking_is_found_within_seconds_also_of_a_slow_engine(slowness, within_s, tmp_path):
    """The slowest takes 0.6 s for a step, as a model of billions of parameters on a CPU does."""
    given = EngineTimes(
        step_s=0.02 * slowness,
        sequence_s=1e-3 * slowness,
        kv_token_s=1e-6 * slowness,
        prefill_tokens_per_s=2500 / slowness,
        load_s=0.0,
        reserve_tokens=16,
    )
    limits = bounds(max_len=6000, kv_capacity=200_000)
    took = []

    async def lead():
        engine = await start_engine(given, limits)
        await engine.load_weights(tmp_path, 0)
        clock = LoopClock()
        speed = await measure_speed(engine, limits, clock)
        took.append(clock.now())
        return speed

    speed = virtually(lead())
    assert took[0] < within_s
    assert speed.step_s == pytest.approx(given.step_s, rel=0.1)
    assert speed.step_s_per_sequence == pytest.approx(given.sequence_s, rel=0.05)
    assert speed.step_s_per_token == pytest.approx(given.kv_token_s, rel=0.3)
    assert speed.prefill_tokens_per_s == pytest.approx(given.prefill_tokens_per_s, rel=0.15)
