"""Memory and time of ranks that share a row (`learner.context_parallel`), beside one rank with the same row.

Memory is what a forward and backward pass adds to a process at its peak, by the kernel's count of resident pages.
Time is the CPU seconds of all ranks, so that it does not depend on how many cores are free.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch
from transformers import Qwen3Config

from laminar_lab.bench.relay_pair import receive, worker
from laminar_lab.bench.report import Row, cpu_s
from laminar_lab.bench.workplace import count_parameters, workplace, write_model
from laminar_lab.calibration.learner import make_trajectory
from laminar_py.config import AlgorithmConfig
from laminar_py.config.algorithm import Aggregation
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.learner import Learner, free_heap, join_group, policy_logprobs
from laminar_py.learner.packing import pack
from laminar_py.records.trajectory import MicroBatch

SHARING = (2, 4)  # ranks
SEQUENCES = 16  # of a row
NARROW = Qwen3Config(  # 3.3 million parameters, so that a row of 32,768 tokens fits a small machine
    vocab_size=8192,
    hidden_size=192,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=512,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def rows(*, repeats: int, tokens: int) -> list[Row]:
    """Compare ranks with `tokens` each of one row with one rank that has all of it; medians of `repeats`."""
    found = []
    with workplace() as folder:
        model = write_model(folder / "model", NARROW)
        for ranks in SHARING:
            alone, shared = (_measure(model, ranks * tokens, count, repeats) for count in (1, ranks))
            setting = (
                f"forward and backward of one row of {ranks * tokens:,} tokens in {SEQUENCES} sequences,"
                f" {count_parameters(NARROW) / 1e6:.1f}M parameters, fp32, no recomputation, gloo; one rank:"
                f" {alone[0] / 1e9:.2f} GB and {alone[1]:.1f} CPU s; median of {repeats} passes"
            )
            share, over = shared[0] / alone[0], shared[1] / alone[1]
            found.append(Row(f"cp{ranks}_activation_share", share, "of one rank's peak", setting))
            found.append(Row(f"cp{ranks}_cpu_over_alone", over, "x, CPU s of all ranks", setting))
    return found


def _measure(model: Path, tokens: int, ranks: int, repeats: int) -> tuple[float, float]:
    """Return the most bytes that a pass adds to a rank, and the CPU seconds of all ranks: medians of passes."""
    with ExitStack() as stack, workplace() as folder:
        work = [
            partial(_rank, model=model, rendezvous=folder / "ranks", rank=rank, ranks=ranks, tokens=tokens)
            for rank in range(ranks)
        ]
        pipes = [stack.enter_context(worker(each)) for each in work]
        passes = []
        for _ in range(1 + repeats):
            for pipe in pipes:
                pipe.send("pass")
            measured = [receive(pipe) for pipe in pipes]
            passes.append((max(grown for grown, _ in measured), sum(seconds for _, seconds in measured)))
    grown, seconds = zip(*passes[1:], strict=True)  # the first one warms up
    return median(grown), median(seconds)


def _rank(pipe: Connection, *, model: Path, rendezvous: Path, rank: int, ranks: int, tokens: int) -> None:
    """Make a learner's rank; at each message run a pass, and send the bytes that it added and its CPU seconds."""
    torch.set_num_threads(1)
    mesh = join_group(str(rendezvous), rank=rank, world_size=ranks) if ranks > 1 else None
    settings = LearnerConfig(world_size=ranks, context_parallel=ranks)
    learner = Learner(ModelConfig(path=model), settings, AlgorithmConfig(), temperature=1.0, seed=0, mesh=mesh)
    items = [make_trajectory(index, tokens // SEQUENCES) for index in range(SEQUENCES)]
    packed = pack(items, max_tokens=tokens, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.0)
    (batch,) = packed.microbatches(0)
    while pipe.recv():
        learner.model.zero_grad()
        pipe.send(measured_pass(learner, [batch]))


def measured_pass(learner: Learner, batches: Sequence[MicroBatch]) -> tuple[int, float]:
    """Train on microbatches; return the bytes that this process grew by at the peak, and its CPU seconds."""
    free_heap()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of resident pages
    seconds = cpu_s(partial(train, learner, batches))
    return _peak_bytes() - before, seconds


def train(learner: Learner, batches: Sequence[MicroBatch]) -> None:
    """Run forward and backward of a policy-gradient loss over the trained tokens."""
    for batch in batches:
        places = np.flatnonzero(batch.loss_weights)
        logprobs, _ = policy_logprobs(learner.model, batch, torch.tensor(places))
        weights = torch.tensor((batch.loss_weights * batch.advantages)[places])
        (weights * logprobs).sum().backward()  # type: ignore[no-untyped-call]


def _peak_bytes() -> int:
    """Return the most resident bytes of this process since the peak was last forgotten."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) * 1024
