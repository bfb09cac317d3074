"""Finished trajectories of random tokens, for measuring a learner without anything that generates."""

import numpy as np

from laminar_py.records import FinishReason, Trajectory
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Kind


def make_trajectory(index: int, length: int, *, vocab: int = 512, prompt: np.ndarray | None = None) -> Trajectory:
    """A finished trajectory of random tokens; the prompt is an eighth of it, or the given one."""
    generator = np.random.default_rng(index)
    first = generator.integers(1, vocab, max(1, length // 8)).astype(np.int32) if prompt is None else prompt
    count = length - len(first)
    return Trajectory(
        id=f"t{index}.0",
        prompt_id=f"p{index}",
        group_id=f"t{index}",
        sample_index=0,
        kind=Kind.TRAIN,
        prompt_ids=first,
        response_ids=generator.integers(1, vocab, count).astype(np.int32),
        logprobs=np.zeros(count, np.float32),
        loss_mask=np.ones(count, np.bool_),
        spans=(Span(0, 0, count),),
        finish_reason=FinishReason.STOP,
        reward=1.0,
        advantage=float(generator.normal()),
    )
