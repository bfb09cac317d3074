"""Measurement of an engine's speed, by a few batches on an idle engine with weights. `rollout.replica` calls it.

The time of a step is the difference between a batch of long and a batch of short responses, divided by the
difference in tokens, so that prefill and scheduling cancel out.
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

SHORT, LONG = 16, 48  # response tokens of the two batches
PROMPT, LONG_PROMPT = 8, 4096  # prompt tokens
FEW = 8  # sequences in a batch with long prompts
REPEATS = 3  # pairs of batches for one result


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
        return max(PROMPT + 1, min(LONG_PROMPT, self.max_len, self.kv_capacity // self.few) - LONG - 1)


async def measure_speed(engine: InferenceEngine, bounds: EngineBounds, clock: Clock) -> EngineSpeed:
    """Measure the speed of an idle engine by about 800 decode steps and at most 200,000 prefill tokens."""
    requests, few, prompt = TimedRequests(engine, bounds, clock), bounds.few, bounds.long_prompt
    await requests.batch(1, PROMPT, SHORT)  # warm-up: compiles kernels, touches memory
    alone = await requests.step_s(1, PROMPT)
    per_sequence = max(0.0, await requests.step_s(bounds.slots, PROMPT) - alone) / max(1, bounds.slots - 1)
    short, long = await requests.step_s(few, PROMPT), await requests.step_s(few, prompt)
    per_token = max(0.0, long - short) / (few * (prompt - PROMPT))
    prefill_s = await requests.batch(1, prompt, 1)
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

    async def step_s(self, sequences: int, prompt: int) -> float:
        """Return seconds of a decode step for `sequences` prompts of `prompt` tokens, the median of `REPEATS`."""
        steps = []
        for _ in range(REPEATS):
            short = await self.batch(sequences, prompt, SHORT)
            long = await self.batch(sequences, prompt, LONG)
            steps.append((long - short) / (LONG - SHORT))
        return max(1e-6, median(steps))

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
