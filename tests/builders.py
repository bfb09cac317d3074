"""Small real records for tests."""

import numpy as np

from laminar_py.config.loading import parse_config
from laminar_py.records.evaluations import EvalAnswer, pass_id, set_figures
from laminar_py.records.events import Evaluated
from laminar_py.records.pieces import PieceRef, RoutedExperts, SamplingMask, TokensRef
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason, Kind, Prompt, Trajectory, TrajectoryRef


def make_config(**sections):
    """A run of three steps with these sections."""
    usual = {
        "name": "t",
        "steps": 3,
        "model": {"path": "m"},
        "data": {"train": "t"},
        "reward": {"use": ["t.py:t"]},
    }
    return parse_config({**usual, **sections})


def make_prompt(index=0, length=3, answer="4"):
    """A prompt of `length` token ids."""
    return Prompt(
        id=f"p{index}",
        index=index,
        text=f"prompt {index}",
        ids=np.arange(2, 2 + length, dtype=np.int32),
        answer=answer,
    )


def make_trajectory(
    id="g0.0", *, prompt=3, response=5, version=0, seed=0, reward=1.0, advantage=0.0, weight=1.0, loss_mask=None
):
    """A finished trajectory with random tokens under one version."""
    rng = np.random.default_rng(seed)
    return Trajectory(
        id=id,
        prompt_id="p0",
        group_id=id.split(".")[0],
        sample_index=int(id.split(".")[1]) if "." in id else 0,
        kind=Kind.TRAIN,
        prompt_ids=rng.integers(2, 50, prompt).astype(np.int32),
        response_ids=rng.integers(2, 50, response).astype(np.int32),
        logprobs=-rng.random(response).astype(np.float32),
        loss_mask=np.ones(response, np.bool_) if loss_mask is None else loss_mask,
        spans=(Span(version, 0, response),),
        finish_reason=FinishReason.STOP,
        reward=reward,
        advantage=advantage,
        advantage_scale=1.0,
        weight=weight,
    )


def make_ref(name="replica-0-1-0.1", *, digest=bytes(16)):
    """A reference to a piece that nobody wrote."""
    return PieceRef(name, 0, 100, digest)


def make_finished(
    id="g0.0",
    *,
    prompt=3,
    response=5,
    version=0,
    seed=0,
    reward=1.0,
    advantage=0.0,
    weight=1.0,
    num_trained=None,
    earned=None,
    tokens=None,
    columns=None,
):
    """What decisions have of `make_trajectory` with the same arguments; by default its tokens are one piece."""
    ids = np.random.default_rng(seed).integers(2, 50, prompt).astype(np.int32)
    return TrajectoryRef(
        id=id,
        prompt_id="p0",
        group_id=id.split(".")[0],
        sample_index=int(id.split(".")[1]) if "." in id else 0,
        kind=Kind.TRAIN,
        prompt_ids=ids,
        tokens=(TokensRef(0, response, make_ref()),) if tokens is None else tokens,
        num_trained=response if num_trained is None else num_trained,
        spans=(Span(version, 0, response),),
        finish_reason=FinishReason.STOP,
        reward=reward,
        advantage=advantage,
        weight=weight,
        earned=earned,
        columns=columns or {},
    )


def make_mask(ids):
    """A sampling mask of 1 to 3 ids for each token, its own among them; the same ids give the same mask."""
    rows = [[*range(900, 900 + token % 3), token] for token in ids.tolist()]
    counts = np.array([len(row) for row in rows], np.int32)
    return SamplingMask(counts, np.array([id for row in rows for id in row], np.int32))


def make_experts(start, end, *, width=1):
    """Experts of positions [start, end) in 3 layers, 2 in each; a position always has the same ones."""
    experts = (np.arange(start, end)[:, None] * 7 + np.arange(6)) % 128
    return RoutedExperts(start=start, layers=3, top_k=2, width=width, data=experts.astype(f"<u{width}").tobytes())


def make_answers(rewards, *, answers=None, terms=None, length=10):
    """Answers to problems by their rewards, e.g. `[[1.0, 0.0], [None, 0.0]]`: two samples of two problems."""
    return [
        EvalAnswer(
            problem=problem,
            sample=sample,
            reward=reward,
            answer="" if answers is None else answers[problem][sample],
            terms={name: values[problem][sample] for name, values in (terms or {"math": rewards}).items()}
            if reward is not None
            else {},
            length=length * (problem + 1) + sample,
            truncated=sample == 1,
        )
        for problem, group in enumerate(rewards)
        for sample, reward in enumerate(group)
    ]


def make_evaluated(
    mean=0.5, *, step=3, version=3, rl_s=3.0, problems=8, unscored=0, set_name="heldout", index=0, length=10
):
    """An evaluation of as many problems, of which this share is solved and so many have no score."""
    scored = problems - unscored
    rewards = [[float(place < round(mean * scored))] for place in range(scored)] + [[None]] * unscored
    return Evaluated(
        pass_id=pass_id(index, set_name),
        set_name=set_name,
        version=version,
        step=step,
        rl_s=rl_s,
        figures=set_figures(make_answers(rewards, length=length), samples=1, verdicts=["math"]),
    )
