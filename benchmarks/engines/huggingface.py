"""The embedded engine against `generate` of Hugging Face transformers: useful tokens per CPU-second.

Rows `local_over_hf_c*` and `hf_useful_tokens_c*`. Both sides serve one model on one thread in this process and
take turns on the same requests. `generate` gets batches in the order of arrival, padded on the left; a row stops
at its own length, and the batch goes on to its longest. Invariant: both draw at temperature 1 from the whole
vocabulary and give every token's log-probability; only tokens that were asked for count.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3ForCausalLM
from transformers.utils import logging

from laminar_lab.bench.engines.local import (
    RATE,
    TRAFFIC,
    WARM_TOKENS,
    Ask,
    Traffic,
    tokens_per_cpu_s,
    written_model,
)
from laminar_lab.bench.models import SMALL
from laminar_lab.bench.report import Row
from laminar_lab.bench.turns import Ratio, Tell, cpu_s, in_turn

TRIAL_REQUESTS = 8  # at least, to choose a cache for `generate`


def rows(
    *, repeats: int, tell: Tell, model: PretrainedConfig = SMALL, traffic: Sequence[Traffic] = TRAFFIC
) -> list[Row]:
    """Ratio and `generate`'s rate, medians over `repeats` rounds; `tell` hears of each.

    Sets this process to one torch thread.
    """
    logging.disable_progress_bar()
    with written_model(model) as folder:
        hf = HuggingFace.load(folder)
        return [row for each in traffic for row in _compare(folder, hf, each, repeats=repeats, tell=tell)]


def _compare(folder: Path, hf: "HuggingFace", traffic: Traffic, *, repeats: int, tell: Tell) -> list[Row]:
    slots = traffic.concurrency
    trial = traffic.asks(0, vocab=hf.vocab)[: max(slots, TRIAL_REQUESTS)]
    cache = hf.faster_cache(trial, concurrency=slots)

    def generate(number: int) -> float:
        asks = traffic.asks(number + 1, vocab=hf.vocab)
        took_s = cpu_s(partial(hf.answer, asks, concurrency=slots, cache=cache))
        return sum(ask.length for ask in asks) / took_s

    tell(f"concurrency {slots}, {RATE}")
    serve = partial(tokens_per_cpu_s, folder, traffic, vocab=hf.vocab)
    rates = in_turn({"hf": generate, "local": serve}, rounds=repeats, tell=tell)
    ratio = Ratio.of(rates["local"], rates["hf"])
    conditions = f"{traffic.tell(hf.config)}; {ratio}; generate with its {cache} cache"
    return [
        Row(f"local_over_hf_c{slots}", ratio.median, "x", conditions),
        Row(f"hf_useful_tokens_c{slots}", median(rates["hf"]), RATE, conditions),
    ]


class HuggingFace:
    """`generate` of one model, with the faster of its caches and the cheapest way to its log-probabilities.

    That way is log-softmax once a step and one gather: `output_logits` with `compute_transition_scores` keeps all
    logits and costs up to a sixth more.
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
        """The cache that takes less CPU time for all of `asks`; also the warm-up."""
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
