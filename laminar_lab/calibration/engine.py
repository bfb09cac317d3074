"""Times of an engine, measured through the calls that a replica makes. Called by `laminar calibrate`.

A decode step is what a batch of longer responses takes over one of shorter ones, divided by the difference, so
that prefill and scheduling cancel out; the requests of a batch share their prompt, so that they begin together.
Batches take turns, so that whatever else a machine does meets each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from laminar_lab.calibration.fit import LinearFit, TimedShape, fit
from laminar_py.config import ConfigError
from laminar_py.config.emulation import EngineTimes
from laminar_py.records import InferenceEngine
from laminar_py.records.host import Clock
from laminar_py.rollout import LONG_PROMPT, PROMPT, EngineBounds, TimedRequests

SHORT, LONG = 16, 80  # response tokens of the two batches
SHARES = (0.125, 0.5, 1.0)  # of the slots, beside a single sequence
LEAST_S = 1e-6  # that a step is said to take at least


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Requests of a batch, e.g. `BatchShape(sequences=64, prompt=400)`."""

    sequences: int
    prompt: int  # tokens

    @property
    def kv_tokens(self) -> float:
        """Tokens in the cache, mean of the steps that count."""
        return self.sequences * (self.prompt + (SHORT + LONG - 1) / 2)


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """Times of an engine and the fit of its decode steps."""

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
    tell: Callable[[str], None],
) -> MeasuredEngine:
    """Medians of `repeats` rounds, after one that does not count; `weights` is a folder that it loads.

    `reserve_tokens` is what it keeps free for growth, which is not measured; it computes on so many `gpus`. Raises
    `ConfigError` where responses are too short to measure.
    """
    tell("engine: loads")
    load_s = await _load_s(engine, clock, weights, repeats=repeats)
    requests, shapes = TimedRequests(engine, bounds, clock), shapes_of(bounds)
    found: dict[BatchShape, list[float]] = {shape: [] for shape in shapes}
    for turn in range(repeats + 1):
        first = turn % len(shapes)
        for shape in shapes[first:] + shapes[:first]:
            found[shape].append(await _step_s(requests, shape))
        tell(f"engine: decode steps, round {turn} of {repeats}" if turn else "engine: warm")
    observations = [_timed(shape, median(steps[1:])) for shape, steps in found.items()]
    steps = fit(observations)
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


def shapes_of(bounds: EngineBounds) -> list[BatchShape]:
    """Batches of several sizes at several lengths of context, as far as they fit."""
    counts = sorted({1, *(max(1, round(share * bounds.slots)) for share in SHARES)})
    longest = min(LONG_PROMPT, bounds.max_len - LONG - 1)
    if longest < PROMPT:
        raise ConfigError(
            f"rollout.max_len={bounds.max_len}: leaves no room for {LONG} response tokens after a prompt of"
            f" {PROMPT}, with which decode steps are measured; raise it"
        )
    shapes = []
    for count in counts:
        room = min(longest, bounds.kv_capacity // count - LONG - SHORT)  # SHORT: what engines keep for growth
        prompts = sorted({PROMPT, (PROMPT + room) // 2, room}) if room > PROMPT else [PROMPT]
        shapes += [BatchShape(count, prompt) for prompt in prompts]
    return shapes


async def _load_s(engine: InferenceEngine, clock: Clock, weights: Path, *, repeats: int) -> float:
    """Seconds of a load, without the first."""
    took = []
    for version in range(repeats + 1):
        began = clock.now()
        await engine.load_weights(weights, version)
        took.append(clock.now() - began)
    return median(took[1:])


async def _step_s(requests: TimedRequests, shape: BatchShape) -> float:
    short = await requests.batch(shape.sequences, shape.prompt, SHORT, groups=1)
    long = await requests.batch(shape.sequences, shape.prompt, LONG, groups=1)
    return max(LEAST_S, (long - short) / (LONG - SHORT))


def _timed(shape: BatchShape, step_s: float) -> TimedShape:
    name = f"{shape.sequences} x {shape.kv_tokens / shape.sequences:.0f} tokens"
    return TimedShape(name, (1, shape.sequences, shape.kv_tokens), step_s)


async def _prefill_s(
    requests: TimedRequests, bounds: EngineBounds, steps: LinearFit, *, repeats: int
) -> tuple[float, int]:
    """Seconds to put tokens into the cache, and their number: a few long prompts, without the step after them."""
    few, prompt = bounds.few, bounds.long_prompt
    took = [await requests.batch(few, prompt, 1) for _ in range(repeats + 1)]
    whole, step_s = median(took[1:]), steps.seconds((1, few, few * prompt))
    return max(whole - step_s, whole / 2), few * prompt
