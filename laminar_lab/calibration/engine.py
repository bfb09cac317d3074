"""Measurement of an engine through the calls of a replica. Called by `laminar calibrate`.

Two batches that differ only in response length differ by decode steps alone; prefill and scheduling cancel out.
The requests of a batch share their prompt, so they start together. Batches of all shapes take turns, so other load
on the machine affects each shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from laminar_lab.emulation.settings import EngineTimes
from laminar_lab.step_time import LinearFit, TimedShape, decode_terms, fit
from laminar_py.config import ConfigError
from laminar_py.records import InferenceEngine
from laminar_py.records.host import Clock
from laminar_py.rollout import LONG_PROMPT, PROMPT, EngineBounds, TimedRequests

SHORT, LONG = 16, 80  # response tokens of the two batches
SHARES = (0.125, 0.5, 1.0)  # of the slots, in addition to a single sequence
LEAST_S = 1e-6  # lower bound of a step, since noise can make a difference negative


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Requests of a batch, e.g. `BatchShape(sequences=64, prompt=400)`."""

    sequences: int
    prompt: int  # tokens

    @property
    def kv_tokens(self) -> float:
        """Tokens in the cache, mean over the steps in which the two batches differ."""
        return self.sequences * (self.prompt + (SHORT + LONG - 1) / 2)


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """Times of an engine, and the fit of its decode steps."""

    times: EngineTimes
    steps: LinearFit


async def measure_engine(
    engine: InferenceEngine,
    bounds: EngineBounds,
    clock: Clock,
    *,
    weights: Path,
    reserve_tokens: int,
    gpus: int,
    repeats: int,
    log: Callable[[str], None],
) -> MeasuredEngine:
    """Measure an engine: medians of `repeats` rounds after a round for warming up.

    The engine loads the folder `weights`. `reserve_tokens` and `gpus` go into the profile unmeasured. Raises
    `ConfigError` if `bounds` leave too little room for responses.
    """
    log("engine: loads")
    load_s = await _load_s(engine, clock, weights, repeats=repeats)
    requests, shapes = TimedRequests(engine, bounds, clock), choose_shapes(bounds)
    found: dict[BatchShape, list[float]] = {shape: [] for shape in shapes}
    for turn in range(repeats + 1):
        first = turn % len(shapes)
        for shape in shapes[first:] + shapes[:first]:
            found[shape].append(await _step_s(requests, shape))
        log(f"engine: decode steps, round {turn} of {repeats}" if turn else "engine: warm")
    steps = fit([_timed(shape, median(times[1:])) for shape, times in found.items()])
    step_s, sequence_s, kv_token_s = steps.coefficients
    prefill_s, num_tokens = await _prefill_s(requests, bounds, steps, repeats=repeats)
    times = EngineTimes(
        step_s=max(LEAST_S, step_s),
        sequence_s=sequence_s,
        kv_token_s=kv_token_s,
        prefill_tokens_per_s=num_tokens / prefill_s,
        load_s=load_s,
        reserve_tokens=reserve_tokens,
        gpus=gpus,
    )
    return MeasuredEngine(times, steps)


def choose_shapes(bounds: EngineBounds) -> list[BatchShape]:
    """Choose batches of several sizes and context lengths that fit. Raises `ConfigError`."""
    counts = sorted({1, *(max(1, round(share * bounds.slots)) for share in SHARES)})
    longest = min(LONG_PROMPT, bounds.max_len - LONG - 1)
    if longest < PROMPT:
        raise ConfigError(
            f"rollout.max_len={bounds.max_len}: leaves no room for {LONG} response tokens after a prompt of"
            f" {PROMPT}, which the measurement of decode steps needs; raise it"
        )
    shapes = []
    for count in counts:
        room = min(longest, bounds.kv_capacity // count - LONG - SHORT)  # SHORT: for the reserve of engines
        prompts = sorted({PROMPT, (PROMPT + room) // 2, room}) if room > PROMPT else [PROMPT]
        shapes += [BatchShape(count, prompt) for prompt in prompts]
    return shapes


async def _load_s(engine: InferenceEngine, clock: Clock, weights: Path, *, repeats: int) -> float:
    """Measure a load of weights; the first load does not count."""
    took = []
    for version in range(repeats + 1):
        began = clock.now()
        await engine.load_weights(weights, version)
        took.append(clock.now() - began)
    return median(took[1:])


async def _step_s(requests: TimedRequests, shape: BatchShape) -> float:
    """Measure a decode step of a batch."""
    short = await requests.batch(shape.sequences, shape.prompt, SHORT, groups=1)
    long = await requests.batch(shape.sequences, shape.prompt, LONG, groups=1)
    return max(LEAST_S, (long - short) / (LONG - SHORT))


def _timed(shape: BatchShape, step_s: float) -> TimedShape:
    name = f"{shape.sequences} x {shape.kv_tokens / shape.sequences:.0f} tokens"
    return TimedShape(name, decode_terms(shape.sequences, shape.kv_tokens), step_s)


async def _prefill_s(
    requests: TimedRequests, bounds: EngineBounds, steps: LinearFit, *, repeats: int
) -> tuple[float, int]:
    """Measure the prefill of a few long prompts, without the decode step after it; return seconds and tokens."""
    few, prompt = bounds.few, bounds.long_prompt
    took = [await requests.batch(few, prompt, 1) for _ in range(repeats + 1)]
    whole, step_s = median(took[1:]), steps.seconds(decode_terms(few, few * prompt))
    return max(whole - step_s, whole / 2), few * prompt
