"""The embedded engine beside `generate` of Hugging Face transformers: useful tokens per CPU-second.

Both sides serve one model on one thread in this process and take turns on the same requests of log-normal lengths.
The engine gets as many requests at a time as it has slots. `generate` gets batches in the order of arrival, padded
on the left; a row stops at its own length, and the batch runs to its longest row. Both sides draw at temperature 1
from the whole vocabulary and give the log-probability of every token. Only requested tokens count.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from laminar_lab.bench.report import Ratio, Row, cpu_s, in_turn, log_line
from laminar_lab.bench.workplace import SMALL, count_parameters, log_normal_lengths, workplace, write_model
from laminar_py.engines.local import LocalEngine
from laminar_py.records import GenerateRequest, SamplingParams
from laminar_py.records.codec import IntArray

ROWS = ("local_over_hf_c1", "local_over_hf_c8", "local_over_hf_c32")
MEDIAN, P95, CAP = 64, 263, 400  # response tokens
SIGMA = math.log(P95 / MEDIAN) / 1.645  # 95 % of a normal distribution lie below 1.645 standard deviations
PROMPT_LENGTHS = (16, 48)  # the shortest and the longest; uniform between them
WARM_TOKENS = 8  # of each request before the clock starts: tracing, and first use of kernels
TRIAL_REQUESTS = 8  # at least, to choose a cache for `generate`
NUM_REQUESTS = {1: 8, 8: 32, 32: 96}  # of a round, by the number of requests at a time
NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and the number of tokens after it, e.g. `Request(ids, 57)`."""

    prompt: IntArray  # [P]
    length: int


def rows(
    *, repeats: int = 3, model: PretrainedConfig = SMALL, num_requests: dict[int, int] = NUM_REQUESTS
) -> list[Row]:
    """Compare the rates of both sides at each concurrency, medians over `repeats` rounds."""
    logging.disable_progress_bar()
    torch.set_flush_denormal(True)  # as in the engine's thread
    try:
        with workplace() as folder:
            write_model(folder, model)
            generate = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
            return [
                _compare(folder, generate, slots, num_requests=count, repeats=repeats)
                for slots, count in num_requests.items()
            ]
    finally:
        torch.set_flush_denormal(False)


def _compare(folder: Path, model: PreTrainedModel, slots: int, *, num_requests: int, repeats: int) -> Row:
    """Measure both sides with `slots` requests at a time; `generate` uses the cache that is faster in a trial."""
    draw = partial(_draw_requests, slots, vocab=model.config.vocab_size)
    trial = draw(0, count=max(slots, TRIAL_REQUESTS))
    warm = [Request(request.prompt, WARM_TOKENS) for request in trial[:slots]]
    trial_s: dict[str, float] = {}
    for cache in ("dynamic", "static"):
        _generate_all(model, warm, slots=slots, cache=cache)
        trial_s[cache] = cpu_s(partial(_generate_all, model, trial, slots=slots, cache=cache))
    cache = min(trial_s, key=trial_s.__getitem__)

    def hugging_face(number: int) -> float:
        requests = draw(number + 1, count=num_requests)
        seconds = cpu_s(partial(_generate_all, model, requests, slots=slots, cache=cache))
        return sum(request.length for request in requests) / seconds

    def local(number: int) -> float:
        requests = draw(number + 1, count=num_requests)
        return sum(request.length for request in requests) / asyncio.run(_serve(folder, requests, slots=slots))

    log_line(f"concurrency {slots}, tokens per CPU-second")
    rates = in_turn({"hf": hugging_face, "local": local}, rounds=repeats)
    size = f"{count_parameters(model.config) / 1e6:.1f}M parameters in fp32, one thread"
    conditions = (
        f"c{slots}: {num_requests} requests a round, {slots} at a time; {size}; log-normal lengths, median"
        f" {MEDIAN}, p95 {P95}, cap {CAP}; {median(rates['local']):,.0f} useful tokens per CPU-second, generate"
        f" with its {cache} cache {median(rates['hf']):,.0f}"
    )
    return Ratio.between(rates["local"], rates["hf"]).row(f"local_over_hf_c{slots}", conditions)


def _draw_requests(slots: int, number: int, *, count: int, vocab: int) -> list[Request]:
    """Draw the requests of a round, always the same for its number."""
    rng = np.random.default_rng([slots, number])
    shortest, longest = PROMPT_LENGTHS
    return [
        Request(rng.integers(0, vocab, rng.integers(shortest, longest, endpoint=True), dtype=np.int32), length)
        for length in log_normal_lengths(rng, count, median=MEDIAN, sigma=SIGMA, cap=CAP)
    ]


# ---- the embedded engine


async def _serve(folder: Path, requests: Sequence[Request], *, slots: int) -> float:
    """Serve all requests by a warm engine; return the CPU seconds of engine and event loop."""
    max_len = PROMPT_LENGTHS[1] + max(CAP, WARM_TOKENS)
    engine = LocalEngine(folder, max_batch=slots, max_len=max_len, kv_capacity=slots * max_len)
    await engine.start()
    await engine.load_weights(folder, 1)
    warm = [Request(request.prompt, WARM_TOKENS) for request in requests[:slots]]
    await asyncio.gather(*(_answer(engine, request, seed=seed) for seed, request in enumerate(warm)))
    began = time.process_time()
    await asyncio.gather(*(_answer(engine, request, seed=seed) for seed, request in enumerate(requests)))
    elapsed = time.process_time() - began
    await engine.close()
    return elapsed


async def _answer(engine: LocalEngine, request: Request, *, seed: int) -> None:
    """Run one request through the engine; fails unless all its tokens come with log-probabilities."""
    name, num_tokens = f"r{seed}", 0
    sampling = SamplingParams(max_new_tokens=request.length, seed=seed)
    asked = GenerateRequest(
        rid=name, group_id=name, prompt_ids=request.prompt, prefix_ids=NO_IDS, sampling=sampling
    )
    async for delta in engine.generate(asked):
        num_tokens += len(delta.logprobs)
    assert num_tokens == request.length, f"{name} has {num_tokens} tokens of {request.length}"


# ---- `generate` of transformers


def _generate_all(model: PreTrainedModel, requests: Sequence[Request], *, slots: int, cache: str) -> None:
    """Serve all requests, `slots` in a batch."""
    for start in range(0, len(requests), slots):
        _generate(model, requests[start : start + slots], cache=cache)


@torch.inference_mode()
def _generate(model: PreTrainedModel, batch: Sequence[Request], *, cache: str) -> None:
    """Generate for a batch that is padded on the left; each row stops at its own length.

    Takes log-softmax once a step and gathers one value. `output_logits` with `compute_transition_scores` keeps all
    logits and costs up to a sixth more.
    """
    width = max(len(request.prompt) for request in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, width - len(request.prompt) :] = torch.from_numpy(request.prompt)
        mask[row, width - len(request.prompt) :] = 1
    ends = torch.tensor([width + request.length for request in batch])  # [B]
    step, logprobs = ends.new_zeros(0), list[Tensor]()  # [B, V] of the newest step; [B, 1] a step

    def take_logits(_: Tensor, logits: Tensor) -> Tensor:
        nonlocal step
        step = torch.log_softmax(logits, -1)
        return logits

    def ended(ids: Tensor, scores: object, **_: object) -> Tensor:
        logprobs.append(step.gather(1, ids[:, -1:]))
        return ends <= ids.shape[1]

    longest = max(request.length for request in batch)
    model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=longest,
        pad_token_id=0,
        cache_implementation=cache,
        logits_processor=[take_logits],
        stopping_criteria=[ended],
    )
    assert len(logprobs) == longest, f"{len(logprobs)} steps for {longest} tokens"
