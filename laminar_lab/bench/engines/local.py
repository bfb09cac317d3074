"""The embedded engine's rate: rows `local_useful_tokens_c*` of `laminar bench engine`.

The engine gets requests of log-normal lengths at once, as many at a time as it has slots, on one thread of this
process; `benchmarks.engines.huggingface` gives the same requests to `generate`. Invariant: drawn at temperature 1
from the whole vocabulary, with every token's log-probability; only tokens that were asked for count.
"""

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import PretrainedConfig

from laminar_lab.bench.models import SMALL, count_parameters, write_model
from laminar_lab.bench.report import Row
from laminar_lab.bench.turns import Tell, in_turn
from laminar_lab.bench.workplace import workplace
from laminar_py.engines.local.engine import LocalEngine
from laminar_py.records.codec import IntArray
from laminar_py.records.engine import GenerateRequest, SamplingParams

PROMPT_LENGTHS = (16, 48)  # the shortest and the longest; uniform between them
WARM_TOKENS = 8  # of each request before the clock starts: tracing, and first use of kernels
RATE = "tokens per CPU-second"
_P95 = 1.645  # standard deviations of a normal distribution below which 95 % lie
_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """Log-normal response lengths, cut at `cap`."""

    median: float
    p95: float
    cap: int

    def draw(self, count: int, *, rng: np.random.Generator) -> list[int]:
        """`count` lengths of at least one token."""
        deviation = math.log(self.p95 / self.median) / _P95
        lengths: list[int] = (
            np.exp(rng.normal(math.log(self.median), deviation, count)).round().astype(int).tolist()
        )
        return [min(max(length, 1), self.cap) for length in lengths]


LENGTHS = ResponseLengths(median=64, p95=263, cap=400)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, e.g. `Ask(ids, 57)`: a prompt of its own, and exactly 57 tokens after it."""

    prompt: IntArray  # [P]
    length: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one round: `num_requests`, `concurrency` of them at a time."""

    concurrency: int
    num_requests: int
    lengths: ResponseLengths = LENGTHS

    def asks(self, number: int, *, vocab: int) -> list[Ask]:
        """Requests of a round, always the same for its number."""
        rng = np.random.default_rng([self.concurrency, number])
        shortest, longest = PROMPT_LENGTHS
        drawn = self.lengths.draw(self.num_requests, rng=rng)
        return [
            Ask(rng.integers(0, vocab, rng.integers(shortest, longest, endpoint=True), dtype=np.int32), length)
            for length in drawn
        ]

    def tell(self, model: PretrainedConfig) -> str:
        """Conditions, for a table."""
        lengths = self.lengths
        return (
            f"c{self.concurrency}: {self.num_requests} requests a round, {self.concurrency} at a time;"
            f" {count_parameters(model) / 1e6:.1f}M parameters in fp32, one thread; log-normal lengths, median"
            f" {lengths.median:g}, p95 {lengths.p95:g}, cap {lengths.cap}"
        )


TRAFFIC = (Traffic(1, 8), Traffic(8, 32), Traffic(32, 96))


def rows(
    *, repeats: int, tell: Tell, model: PretrainedConfig = SMALL, traffic: Sequence[Traffic] = TRAFFIC
) -> list[Row]:
    """Rates, medians over `repeats` rounds; `tell` hears of each. Sets this process to one torch thread."""
    found = []
    with written_model(model) as folder:
        for each in traffic:
            serve = partial(tokens_per_cpu_s, folder, each, vocab=model.vocab_size)
            tell(f"concurrency {each.concurrency}")
            rates = in_turn({RATE: serve}, rounds=repeats, tell=tell)[RATE]
            told = f"{each.tell(model)}; median of rounds {', '.join(f'{rate:.0f}' for rate in rates)}"
            found.append(Row(f"local_useful_tokens_c{each.concurrency}", median(rates), RATE, told))
    return found


@contextmanager
def written_model(model: PretrainedConfig) -> Iterator[Path]:
    """A model's folder; meanwhile torch computes in this thread as the engine does on its own."""
    torch.set_flush_denormal(True)
    try:
        with workplace() as folder:
            yield write_model(folder, model)
    finally:
        torch.set_flush_denormal(False)


def tokens_per_cpu_s(folder: Path, traffic: Traffic, number: int, *, vocab: int) -> float:
    """Rate of a round, served by a warm engine of its own; its thread and this event loop count together."""
    asks = traffic.asks(number + 1, vocab=vocab)
    return sum(ask.length for ask in asks) / asyncio.run(_serve(folder, asks, traffic))


async def _serve(folder: Path, asks: Sequence[Ask], traffic: Traffic) -> float:
    """CPU seconds for all requests."""
    slots, max_len = traffic.concurrency, PROMPT_LENGTHS[1] + max(traffic.lengths.cap, WARM_TOKENS)
    engine = LocalEngine(folder, max_batch=slots, max_len=max_len, kv_capacity=slots * max_len)
    await engine.start()
    await engine.load_weights(folder, 1)
    await _answer_all(engine, [Ask(ask.prompt, WARM_TOKENS) for ask in asks[:slots]])
    began = time.process_time()
    await _answer_all(engine, asks)
    elapsed = time.process_time() - began
    await engine.close()
    return elapsed


async def _answer_all(engine: LocalEngine, asks: Sequence[Ask]) -> None:
    await asyncio.gather(*(_answer(engine, ask, seed=seed) for seed, ask in enumerate(asks)))


async def _answer(engine: LocalEngine, ask: Ask, *, seed: int) -> None:
    name = f"r{seed}"
    request = GenerateRequest(
        rid=name,
        group_id=name,
        prompt_ids=ask.prompt,
        prefix_ids=_NO_IDS,
        sampling=SamplingParams(max_new_tokens=ask.length, seed=seed),
    )
    num_tokens = 0
    async for delta in engine.generate(request):
        num_tokens += len(delta.logprobs)
    assert num_tokens == ask.length, f"{name} has {num_tokens} tokens of {ask.length}"
