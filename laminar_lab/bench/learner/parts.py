"""Common parts of the learner's benchmarks: learners, lengths, trajectories and their packing."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laminar_lab.bench.lengths import log_normal_lengths
from laminar_lab.calibration.learner import make_trajectory
from laminar_py.config import AlgorithmConfig
from laminar_py.config.algorithm import Aggregation
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.learner import Learner, policy_logprobs
from laminar_py.learner.packing import microbatches, pack
from laminar_py.records import Trajectory
from laminar_py.records.trajectory import MicroBatch

MAX_TOKENS = 2048
SIGMA = float(np.log(5) / 1.645)  # p95 = 5 * p50
RATE = 1e-5  # of learning


def make_learner(folder: Path) -> Learner:
    """Make a learner of the model in `folder`."""
    return Learner(ModelConfig(path=folder), LearnerConfig(lr=RATE), AlgorithmConfig(), temperature=1.0, seed=0)


def pack_here(items: Sequence[Trajectory], *, max_tokens: int = MAX_TOKENS) -> list[MicroBatch]:
    """Pack microbatches of one rank; one microbatch a sequence where `max_tokens` is below the longest."""
    alone = max_tokens < max(item.num_tokens for item in items)
    step = pack(
        items,
        max_tokens=10**9 if alone else max_tokens,
        ranks=1,
        aggregation=Aggregation.TOKEN_MEAN,
        attention_share=0.0,
    )
    if alone:
        return [microbatches([[item]], step.terms)[0] for item in items]
    return list(step.microbatches(0))


def gradient(learner: Learner, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Compute the gradients of a policy-gradient loss over `batches`, one for each parameter."""
    for batch in batches:
        logprobs, _ = policy_logprobs(learner.model, batch)
        (torch.tensor(batch.loss_weights * batch.advantages) * logprobs).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]
    learner.model.zero_grad()
    return gradients


def draw_lengths(count: int, *, median: int, seed: int, longest: int = 1024) -> list[int]:
    """Draw log-normal lengths of prompt and response together."""
    rng = np.random.default_rng(seed)
    return log_normal_lengths(rng, count, median=median, sigma=SIGMA, cap=longest, least=4)


def make_trajectories(lengths: Sequence[int], *, vocab: int = 512) -> list[Trajectory]:
    """Make finished trajectories of these lengths."""
    return [make_trajectory(index, length, vocab=vocab) for index, length in enumerate(lengths)]
