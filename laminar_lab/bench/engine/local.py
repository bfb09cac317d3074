"""The embedded engine beside `generate` of Hugging Face transformers: useful tokens per CPU-second.

Both sides serve one model on one thread in this process and take turns on the same requests of log-normal lengths.
The engine gets as many requests at a time as it has slots. `generate` gets batches in the order of arrival, padded
on the left; a row stops at its own length, and the batch runs to its longest row. Both sides draw at temperature 1
from the whole vocabulary and give the log-probability of every token. Only requested tokens count.
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
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3ForCausalLM
from transformers.utils import logging

from laminar_lab.bench.lengths import log_normal_lengths
from laminar_lab.bench.report import Ratio, Row, cpu_s, in_turn, log_line
from laminar_lab.bench.workplace import SMALL, count_parameters, workplace, write_model
from laminar_py.engines.local import LocalEngine
from laminar_py.records import GenerateRequest, SamplingParams
from laminar_py.records.codec import IntArray

ROWS = ("local_over_hf_c1", "local_over_hf_c8", "local_over_hf_c32")
PROMPT_LENGTHS = (16, 48)  # the shortest and the longest; uniform between them
WARM_TOKENS = 8  # of each request before the clock starts: tracing, and first use of kernels
RATE = "tokens per CPU-second"
DEVIATIONS_95 = 1.645  # standard deviations of a normal distribution below which 95 % lie
_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, e.g. `Ask(ids, 57)`: a prompt of its own, and exactly 57 tokens after it."""

    prompt: IntArray  # [P]
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of one round: `num_requests`, `concurrency` of them at a time."""

    concurrency: int
    num_requests: int
    median: int = 64  # response tokens
    p95: int = 263
    cap: int = 400

    def asks(self, number: int, *, vocab: int) -> list[Ask]:
        """Make the requests of a round, always the same for its number."""
        rng = np.random.default_rng([self.concurrency, number])
        shortest, longest = PROMPT_LENGTHS
        sigma = math.log(self.p95 / self.median) / DEVIATIONS_95
        drawn = log_normal_lengths(rng, self.num_requests, median=self.median, sigma=sigma, cap=self.cap)
        return [
            Ask(rng.integers(0, vocab, rng.integers(shortest, longest, endpoint=True), dtype=np.int32), length)
            for length in drawn
        ]

    def conditions(self, model: PretrainedConfig) -> str:
        """Describe the traffic."""
        return (
            f"c{self.concurrency}: {self.num_requests} requests a round, {self.concurrency} at a time;"
            f" {count_parameters(model) / 1e6:.1f}M parameters in fp32, one thread; log-normal lengths, median"
            f" {self.median}, p95 {self.p95}, cap {self.cap}"
        )


TRAFFIC = tuple(
    Traffic(concurrency=concurrency, num_requests=number) for concurrency, number in ((1, 8), (8, 32), (32, 96))
)


@contextmanager
def written_model(model: PretrainedConfig) -> Iterator[Path]:
    """Write a model and yield its folder; meanwhile torch computes in this thread as in the engine's."""
    torch.set_flush_denormal(True)
    try:
        with workplace() as folder:
            yield write_model(folder, model)
    finally:
        torch.set_flush_denormal(False)


def tokens_per_cpu_s(folder: Path, traffic: Traffic, number: int, *, vocab: int) -> float:
    """Serve a round by a warm engine of its own; return its rate, with the CPU time of engine and event loop."""
    asks = traffic.asks(number + 1, vocab=vocab)
    return sum(ask.length for ask in asks) / asyncio.run(_serve(folder, asks, traffic))


async def _serve(folder: Path, asks: Sequence[Ask], traffic: Traffic) -> float:
    """Serve all requests and return the CPU seconds."""
    slots, max_len = traffic.concurrency, PROMPT_LENGTHS[1] + max(traffic.cap, WARM_TOKENS)
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
    """Run one request through the engine; fails unless all its tokens come with log-probabilities."""
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


TRIAL_REQUESTS = 8  # at least, to choose a cache for `generate`


def rows(*, repeats: int = 3, model: PretrainedConfig = SMALL, traffic: Sequence[Traffic] = TRAFFIC) -> list[Row]:
    """Compare the rates of both sides, medians over `repeats` rounds.

    Sets this process to one torch thread.
    """
    logging.disable_progress_bar()
    with written_model(model) as folder:
        hf = HuggingFace.load(folder)
        return [_compare(folder, hf, each, repeats=repeats) for each in traffic]


def _compare(folder: Path, hf: "HuggingFace", traffic: Traffic, *, repeats: int) -> Row:
    """Measure both sides at one concurrency; `generate` uses the cache that is faster in a trial."""
    slots = traffic.concurrency
    trial = traffic.asks(0, vocab=hf.vocab)[: max(slots, TRIAL_REQUESTS)]
    cache = hf.faster_cache(trial, concurrency=slots)

    def generate(number: int) -> float:
        asks = traffic.asks(number + 1, vocab=hf.vocab)
        took_s = cpu_s(partial(hf.answer, asks, concurrency=slots, cache=cache))
        return sum(ask.length for ask in asks) / took_s

    log_line(f"concurrency {slots}, {RATE}")
    serve = partial(tokens_per_cpu_s, folder, traffic, vocab=hf.vocab)
    rates = in_turn({"hf": generate, "local": serve}, rounds=repeats)
    conditions = (
        f"{traffic.conditions(hf.config)}; {median(rates['local']):,.0f} useful {RATE}, generate with its {cache}"
        f" cache {median(rates['hf']):,.0f}"
    )
    return Ratio.between(rates["local"], rates["hf"]).row(f"local_over_hf_c{slots}", conditions)


class HuggingFace:
    """`generate` of one model, with the faster of its caches and the cheapest way to its log-probabilities.

    It takes log-softmax once a step and gathers one value; `output_logits` with `compute_transition_scores` keeps
    all logits and costs up to a sixth more.
    """

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._model = model
        self.config: PretrainedConfig = model.config
        self.vocab: int = model.config.vocab_size

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the model in `folder`, in the type of its files, with torch's attention."""
        return cls(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval())

    def faster_cache(self, asks: Sequence[Ask], *, concurrency: int) -> str:
        """Return the cache that takes less CPU time for all of `asks`; this also warms the model up."""
        warm = [Ask(ask.prompt, WARM_TOKENS) for ask in asks[:concurrency]]
        elapsed: dict[str, float] = {}
        for cache in ("dynamic", "static"):
            self.answer(warm, concurrency=concurrency, cache=cache)
            elapsed[cache] = cpu_s(partial(self.answer, asks, concurrency=concurrency, cache=cache))
        return min(elapsed, key=elapsed.__getitem__)

    def answer(self, asks: Sequence[Ask], *, concurrency: int, cache: str) -> None:
        """Serve all requests, `concurrency` in a batch."""
        for start in range(0, len(asks), concurrency):
            self._answer_batch(asks[start : start + concurrency], cache=cache)

    @torch.inference_mode()
    def _answer_batch(self, batch: Sequence[Ask], *, cache: str) -> None:
        """Generate for a batch that is padded on the left; each row stops at its own length."""
        width = max(len(ask.prompt) for ask in batch)
        longest = max(ask.length for ask in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(batch):
            ids[row, width - len(ask.prompt) :] = torch.from_numpy(ask.prompt)
            mask[row, width - len(ask.prompt) :] = 1
        watch = RowWatch(torch.tensor([width + ask.length for ask in batch]))
        self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            pad_token_id=0,
            cache_implementation=cache,
            logits_processor=[watch.take_logits],
            stopping_criteria=[watch.ended],
        )
        assert len(watch.logprobs) == longest, f"{len(watch.logprobs)} steps for {longest} tokens"


class RowWatch:
    """Ends each row of a batch at its own length and takes the log-probability of each token drawn."""

    def __init__(self, ends: Tensor) -> None:
        self._ends = ends  # [B] tokens of prompt, padding and response
        self._last = ends.new_zeros(0)  # [B, V] log-probabilities of the step
        self.logprobs: list[Tensor] = []  # [B, 1] a step

    def take_logits(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Logits processor that changes nothing; `ids [B, T]`, `logits [B, V]`."""
        self._last = torch.log_softmax(logits, -1)
        return logits

    def ended(self, ids: Tensor, scores: object, **_: object) -> Tensor:
        """Stopping criterion: rows of `ids [B, T]` that have all their tokens, as `[B]`."""
        self.logprobs.append(self._last.gather(1, ids[:, -1:]))
        return self._ends <= ids.shape[1]
