"""Measurement of an engine's speed, by a few batches on an idle engine with weights. `rollout.replica` calls it.

The time of a step is the difference between a batch of long and a batch of short responses, divided by the
difference in tokens, so that prefill and scheduling cancel out. Each part of the measurement begins with small
batches and repeats larger ones while its share of `MOST_S` lasts, so a slow engine costs accuracy instead of time.
"""

import asyncio
import itertools
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np

from laminar_py.records.codec import IntArray
from laminar_py.records.engine import GenerateRequest, InferenceEngine, SamplingParams
from laminar_py.records.host import Clock
from laminar_py.repack.signals import EngineSpeed

MOST_S = 15.0  # seconds of a measurement, on an engine that takes less than about 0.2 s for a step
PARTS = 4  # of a measurement: one sequence, all slots, long prompts, prefill
PAIRS = ((1, 4), (16, 48), (16, 48), (16, 48))  # response tokens of the two batches of each pair
MOST_TOKENS = max(long for _, long in PAIRS)
PROMPT, LONG_PROMPT = 8, 4096  # prompt tokens
FIRST_PROMPT = 128  # prompt tokens of the first look at prefill, which decides the length of the long prompts
FEW = 8  # sequences in a batch with long prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBounds:
    """Bounds on the requests of a measurement."""

    vocab: int  # token ids
    slots: int  # sequences that the engine decodes at a time
    max_len: int  # tokens of prompt and response
    kv_capacity: int  # tokens
    sampling: SamplingParams  # of the run, since top-p and recording cost time too

    @property
    def few(self) -> int:
        """Number of sequences in a batch with long prompts."""
        return min(FEW, self.slots)

    @property
    def long_prompt(self) -> int:
        """Tokens of a long prompt, so short that the KV cache holds `few` sequences with such prompts."""
        return max(PROMPT + 1, min(LONG_PROMPT, self.max_len, self.kv_capacity // self.few) - MOST_TOKENS - 1)


async def measure_speed(engine: InferenceEngine, bounds: EngineBounds, clock: Clock) -> EngineSpeed:
    """Measure the speed of an idle engine in about `MOST_S` at most.

    A slow engine gets shorter long prompts.
    """
    requests, few, within_s = TimedRequests(engine, bounds, clock), bounds.few, MOST_S / PARTS
    first = min(FIRST_PROMPT, bounds.long_prompt)
    await requests.batch(1, first, 1)  # warm-up: compiles kernels, touches memory
    token_s = await requests.batch(1, first, 1) / first
    alone = await requests.step_s(1, PROMPT, within_s=within_s)
    slots = alone if bounds.slots == 1 else await requests.step_s(bounds.slots, PROMPT, within_s=within_s)
    per_sequence = max(0.0, slots - alone) / max(1, bounds.slots - 1)
    # a pair prefills twice, and takes half of the time at most
    prompt = max(first, min(bounds.long_prompt, int(within_s / (4 * few * token_s))))
    long = await requests.step_s(few, prompt, within_s=within_s)
    per_token = max(0.0, long - alone - per_sequence * (few - 1)) / (few * (prompt - PROMPT))
    whole_s = await requests.batch(1, prompt, 1)
    prefill_s = max(whole_s - alone, whole_s / 2)  # without the decode step after it
    return EngineSpeed(
        step_s=alone,
        step_s_per_sequence=per_sequence,
        step_s_per_token=per_token,
        prefill_tokens_per_s=prompt / prefill_s,
    )


class TimedRequests:
    """Sends requests of chosen sizes to an engine, and times them."""

    def __init__(self, engine: InferenceEngine, bounds: EngineBounds, clock: Clock) -> None:
        self._engine = engine
        self._bounds = bounds
        self._clock = clock
        self._rng = np.random.default_rng(0)
        self._num_requests = 0

    async def step_s(self, sequences: int, prompt: int, *, within_s: float) -> float:
        """Return seconds of a decode step for `sequences` prompts of `prompt` tokens.

        The result is the median over the longest `PAIRS` that `within_s` has room for; the first is always taken.
        """
        steps: dict[int, list[float]] = {}
        now = self._clock.now()
        end, took = now + within_s, 0.0
        for short_tokens, long_tokens in PAIRS:
            growth = long_tokens / max(steps, default=long_tokens)
            if steps and now + growth * took > end:
                break
            short = await self.batch(sequences, prompt, short_tokens)
            long = await self.batch(sequences, prompt, long_tokens)
            steps.setdefault(long_tokens, []).append((long - short) / (long_tokens - short_tokens))
            began, now = now, self._clock.now()
            took = now - began
        return max(1e-6, median(steps[max(steps)]))

    async def batch(self, sequences: int, prompt: int, tokens: int, *, groups: int | None = None) -> float:
        """Send `sequences` requests at once; return the seconds until each has generated `tokens` tokens.

        A prompt is `prompt` random tokens, which no prefix cache has. With `groups` so many prompts are shared.
        """
        prompts = [
            self._rng.integers(0, self._bounds.vocab, prompt).astype(np.int32) for _ in range(groups or sequences)
        ]
        first = self._num_requests
        self._num_requests += sequences
        began = self._clock.now()
        await asyncio.gather(
            *(
                self._request(f"calibration-{first + index}", f"group-{first + index % len(prompts)}", ids, tokens)
                for index, ids in zip(range(sequences), itertools.cycle(prompts), strict=False)
            )
        )
        return self._clock.now() - began

    async def _request(self, name: str, group: str, prompt: IntArray, tokens: int) -> None:
        """Generate `tokens` tokens after a prompt and discard them."""
        sampling = msgspec.structs.replace(self._bounds.sampling, max_new_tokens=tokens, stop_ids=())
        async for _ in self._engine.generate(
            GenerateRequest(
                rid=name, group_id=group, prompt_ids=prompt, prefix_ids=np.empty(0, np.int32), sampling=sampling
            )
        ):
            continue
