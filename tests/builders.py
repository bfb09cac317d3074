"""Small real records for tests."""

import numpy as np

from laminar_py.types import FinishReason, Kind, Prompt, Span, Trajectory


def make_prompt(index=0, length=3, answer="4"):
    """A prompt of `length` token ids."""
    return Prompt(f"p{index}", index, f"prompt {index}", np.arange(2, 2 + length, dtype=np.int32), answer)


def make_trajectory(
    id="g0.0", *, prompt=3, response=5, version=0, seed=0, reward=1.0, advantage=0.0, weight=1.0, loss_mask=None
):
    """A finished trajectory with random tokens under one version."""
    rng = np.random.default_rng(seed)
    return Trajectory(
        id,
        "p0",
        id.split(".")[0],
        int(id.split(".")[1]) if "." in id else 0,
        Kind.TRAIN,
        rng.integers(2, 50, prompt).astype(np.int32),
        rng.integers(2, 50, response).astype(np.int32),
        -rng.random(response).astype(np.float32),
        np.ones(response, np.bool_) if loss_mask is None else loss_mask,
        (Span(version, 0, response),),
        FinishReason.STOP,
        reward,
        None,
        advantage,
        weight,
    )
