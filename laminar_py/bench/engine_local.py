"""The embedded engine against `generate` of Hugging Face transformers: useful tokens per CPU-second.

Rows `local_over_hf_c*` of `laminar bench engine`. Both sides serve one model on one thread in this process and
take turns on the same requests. `generate` gets batches in the order of arrival, padded on the left; each row
stops at its own length, and the batch goes on to its longest. The engine gets all requests at once.
Invariant: both draw at temperature 1 from the whole vocabulary and give every token's log-probability; only
tokens that were asked for count.
"""

import asyncio
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from laminar_py.bench.models import write_model
from laminar_py.bench.report import Row
from laminar_py.engines.local.engine import LocalEngine
from laminar_py.records.codec import IntArray
from laminar_py.records.engine import GenerateRequest, SamplingParams

MODEL = Qwen3Config(
    vocab_size=8192,
    hidden_size=512,
    num_hidden_layers=7,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1408,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
PROMPT_LENGTHS = (16, 48)  # the shortest and the longest; uniform between them
WARM_TOKENS = 8  # of each request before the clock starts: tracing, and first use of kernels
TRIAL_REQUESTS = 8  # at least, to choose a cache for `generate`
_P95 = 1.645  # standard deviations of a normal distribution below which 95 % lie
_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Load:
    """What one comparison serves in a round: `num_requests`, `concurrency` of them at a time."""

    concurrency: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Lengths:
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


LOADS = (Load(1, 8), Load(8, 32), Load(32, 96))
LENGTHS = Lengths(median=64, p95=263, cap=400)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, e.g. `Ask(ids, 57)`: a prompt of its own, and exactly 57 tokens after it."""

    prompt: IntArray  # [P]
    length: int


@dataclass(frozen=True, slots=True)
class Round:
    """Useful tokens per CPU-second of both sides on the same requests, e.g. `Round(370.0, 145.0)`."""

    local: float
    hf: float

    @property
    def ratio(self) -> float:
        """How much more the embedded engine makes."""
        return self.local / self.hf


def rows(
    *,
    repeats: int,
    tell: Callable[[str], None],
    model: Qwen3Config = MODEL,
    loads: Sequence[Load] = LOADS,
    lengths: Lengths = LENGTHS,
) -> list[Row]:
    """Three rows for each load: the ratio and both rates, medians over `repeats` rounds; `tell` hears of each.

    Sets this process to one torch thread.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as the engine does on its own thread
    logging.disable_progress_bar()
    found: list[Row] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            hf = HuggingFace.load(write_model(Path(folder), model))
            for load in loads:
                found += _compare(Path(folder), hf, load, repeats=repeats, lengths=lengths, tell=tell)
    finally:
        torch.set_flush_denormal(False)
    return found


def _compare(
    folder: Path,
    hf: "HuggingFace",
    load: Load,
    *,
    repeats: int,
    lengths: Lengths,
    tell: Callable[[str], None],
) -> list[Row]:
    concurrency = load.concurrency
    trial = _asks(load, 0, lengths=lengths, vocab=hf.vocab)[: max(concurrency, TRIAL_REQUESTS)]
    cache = hf.faster_cache(trial, concurrency=concurrency)
    rounds: list[Round] = []
    for number in range(1, repeats + 1):
        asks = _asks(load, number, lengths=lengths, vocab=hf.vocab)
        num_tokens = sum(ask.length for ask in asks)
        hf_s = _cpu_s(partial(hf.answer, asks, concurrency=concurrency, cache=cache))
        local_s = asyncio.run(_serve(folder, asks, concurrency=concurrency, cap=lengths.cap))
        rounds.append(Round(num_tokens / local_s, num_tokens / hf_s))
        told = f"{rounds[-1].local:.0f} over {rounds[-1].hf:.0f} tokens per CPU-second: {rounds[-1].ratio:.2f}"
        tell(f"concurrency {concurrency}, round {number} of {repeats}: {told}")
    return _summary(load, rounds, lengths=lengths, model=f"{hf.num_parameters / 1e6:.1f}M parameters", cache=cache)


def _summary(load: Load, rounds: list[Round], *, lengths: Lengths, model: str, cache: str) -> list[Row]:
    ratios = ", ".join(f"{each.ratio:.2f}" for each in rounds)
    spread = f"log-normal lengths, median {lengths.median:g}, p95 {lengths.p95:g}, cap {lengths.cap}"
    conditions = (
        f"c{load.concurrency}: {load.num_requests} requests a round, {load.concurrency} at a time; {model} in"
        f" fp32, one thread; {spread}; median of rounds {ratios}; generate with its {cache} cache"
    )
    name, rate = f"c{load.concurrency}", "tokens per CPU-second"
    return [
        Row(f"local_over_hf_{name}", median(each.ratio for each in rounds), "x", conditions),
        Row(f"local_useful_tokens_{name}", median(each.local for each in rounds), rate, conditions),
        Row(f"hf_useful_tokens_{name}", median(each.hf for each in rounds), rate, conditions),
    ]


def _asks(load: Load, number: int, *, lengths: Lengths, vocab: int) -> list[Ask]:
    """The requests of one round, always the same."""
    rng = np.random.default_rng([load.concurrency, number])
    shortest, longest = PROMPT_LENGTHS
    drawn = lengths.draw(load.num_requests, rng=rng)
    return [
        Ask(rng.integers(0, vocab, rng.integers(shortest, longest, endpoint=True), dtype=np.int32), length)
        for length in drawn
    ]


def _cpu_s(work: Callable[[], None]) -> float:
    """CPU seconds of all threads of this process while `work` runs."""
    began = time.process_time()
    work()
    return time.process_time() - began


# ---- Hugging Face


class HuggingFace:
    """`generate` of one model, with the faster of its caches and the cheapest way to its log-probabilities.

    That way is log-softmax once a step and one gather: `output_logits` with `compute_transition_scores` keeps all
    logits and costs up to a sixth more.
    """

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._model = model
        self.vocab: int = model.config.vocab_size
        self.num_parameters: int = model.num_parameters()

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The model in `folder`, in the type of its files, with torch's attention."""
        return cls(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval())

    def faster_cache(self, asks: Sequence[Ask], *, concurrency: int) -> str:
        """The cache that takes less CPU time for all of `asks`; also the warm-up."""
        warm = [Ask(ask.prompt, WARM_TOKENS) for ask in asks[:concurrency]]
        elapsed: dict[str, float] = {}
        for cache in ("dynamic", "static"):
            self.answer(warm, concurrency=concurrency, cache=cache)
            elapsed[cache] = _cpu_s(partial(self.answer, asks, concurrency=concurrency, cache=cache))
        return min(elapsed, key=elapsed.__getitem__)

    def answer(self, asks: Sequence[Ask], *, concurrency: int, cache: str) -> None:
        """All requests, `concurrency` in a batch."""
        for start in range(0, len(asks), concurrency):
            self._answer_batch(asks[start : start + concurrency], cache=cache)

    @torch.inference_mode()
    def _answer_batch(self, batch: Sequence[Ask], *, cache: str) -> None:
        width = max(len(ask.prompt) for ask in batch)
        longest = max(ask.length for ask in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(batch):
            ids[row, width - len(ask.prompt) :] = torch.from_numpy(ask.prompt)
            mask[row, width - len(ask.prompt) :] = 1
        watch = _RowWatch(torch.tensor([width + ask.length for ask in batch]))
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


class _RowWatch:
    """Ends each row of a batch at its own length and takes the log-probability of each token drawn."""

    def __init__(self, ends: Tensor) -> None:
        self._ends = ends  # [B] tokens of prompt, padding and response
        self._last = ends.new_zeros(0)  # [B, V] log-probabilities of the step
        self.logprobs: list[Tensor] = []  # [B, 1] a step

    def take_logits(self, ids: Tensor, logits: Tensor) -> Tensor:
        """A logits processor that changes nothing; `ids [B, T]`, `logits [B, V]`."""
        self._last = torch.log_softmax(logits, -1)
        return logits

    def ended(self, ids: Tensor, scores: object, **_: object) -> Tensor:
        """A stopping criterion: rows of `ids [B, T]` that have all their tokens, as `[B]`."""
        self.logprobs.append(self._last.gather(1, ids[:, -1:]))
        return self._ends <= ids.shape[1]


# ---- the embedded engine


async def _serve(folder: Path, asks: Sequence[Ask], *, concurrency: int, cap: int) -> float:
    """CPU seconds of a warm engine for all requests, its thread and this event loop together."""
    max_len = PROMPT_LENGTHS[1] + max(cap, WARM_TOKENS)
    engine = LocalEngine(folder, max_batch=concurrency, max_len=max_len, kv_capacity=concurrency * max_len)
    await engine.start()
    await engine.load_weights(folder, 1)
    await _answer_all(engine, [Ask(ask.prompt, WARM_TOKENS) for ask in asks[:concurrency]])
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
