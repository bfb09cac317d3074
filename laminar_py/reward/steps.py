"""The term `steps`: a process reward model on SGLang scores each step of a response, all in one prefill.

The model reads the prompt and the response by their token ids, with a separator after each step, at which it says
how likely its label for good steps is. Source of the call: SGLang's `/v1/score` with `score_extraction_token`, for
which a server is started with `--disable-radix-cache --chunked-prefill-size -1`. Credit by the minimum: PURE,
arXiv 2504.15275.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Annotated, Self

import msgspec
import numpy as np
from pydantic import Field, model_validator

from laminar_py.config.reward import RewardKind, ServeContext, ServedReward, TermConfig
from laminar_py.config.section import Count
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.scoring import NoValueError, Reward, ScoringRequest
from laminar_py.reward.servers import Servers, check_urls, open_servers

TEMPERATURE = 0.1  # of the minimum


class StepCredit(StrEnum):
    """Ways to turn scores of steps into rewards of tokens."""

    RETURNS = "returns"
    MINIMUM = "minimum"


class StepsTerm(TermConfig):
    """A reward for each step of a response, at its last token: how likely a process reward model finds it good."""

    kind: str = "steps"
    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """SGLang servers of the model, e.g. `[http://10.0.0.4:30000]`; calls go to the least busy."""
    separator: str
    """Special token of the model after each step, e.g. `<extra_0>`; no prompt may hold it."""
    separator_id: Annotated[int, Field(ge=0)]
    """Its id. The model and the policy share a tokenizer."""
    labels: tuple[int, int]
    """Ids of the model's tokens for a good and for a bad step."""
    ends: str = "\n\n"
    """Text that ends a step; the end of the response ends the last one."""
    credit: StepCredit = StepCredit.RETURNS
    """`returns`: a step's score is its reward, and what follows from a token counts for it. `minimum`: scores are
    weighted so that their sum is near the lowest, and a token's return is near that of the worst step after it."""
    key: str | None = None
    """Environment variable with the servers' key, one of those in `reward.env`."""
    at_once: Count = 32
    """Responses that each scorer asks about at a time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_urls(self.urls)
        return self


class StepScores(msgspec.Struct):
    """Answer of `/v1/score`: for each item, each separator, each label a probability."""

    scores: list[list[list[float]]]


class StepsReward:
    """Asks the servers of a term."""

    def __init__(self, term: StepsTerm, servers: Servers, decode: Callable[[IntArray], str]) -> None:
        self._term = term
        self._servers = servers
        self._decode = decode
        self.at_once = term.at_once

    async def __call__(self, request: ScoringRequest) -> Reward:
        """[L], 0 but at the last token of each step."""
        ends = step_ends(request.response_ids, self._decode, self._term.ends)
        scores = await self._scores(request, ends)
        rewards = np.zeros(len(request.response_ids), np.float32)
        rewards[ends] = scores if self._term.credit is StepCredit.RETURNS else minimum_rewards(scores)
        return Reward(rewards, text="steps " + " ".join(f"{score:.3f}" for score in scores))

    async def _scores(self, request: ScoringRequest, ends: Sequence[int]) -> FloatArray:
        """How likely each step is good, [S]."""
        term = self._term
        body = {
            "query": request.prompt_ids.tolist(),
            "items": [separated(request.response_ids, ends, term.separator_id)],
            "label_token_ids": list(term.labels),
            "apply_softmax": True,
            "score_extraction_token": term.separator,
        }
        answer = await self._servers.ask("v1/score", body, StepScores)
        scores = np.array(answer.scores[0] if answer.scores else [], np.float32)
        if scores.shape != (len(ends), len(term.labels)) or not np.isfinite(scores).all():
            raise NoValueError(f"{len(ends)} steps were asked for, scores have shape {scores.shape}")
        good: FloatArray = scores[:, 0]
        return good


def step_ends(ids: IntArray, decode: Callable[[IntArray], str], end: str) -> list[int]:
    """Places of the last token of each step: those whose text completes `end`, and the last of all."""
    ends, text = [], ""
    for place in range(len(ids)):
        text += decode(ids[place : place + 1])
        if end in text:
            ends.append(place)
            text = ""
    if not ends or ends[-1] != len(ids) - 1:
        ends.append(len(ids) - 1)
    return ends


def separated(ids: IntArray, ends: Sequence[int], separator: int) -> list[int]:
    """Ids with the separator after each step."""
    given = np.insert(ids, np.array(ends) + 1, separator)
    return [int(id) for id in given]


def minimum_rewards(scores: FloatArray) -> FloatArray:
    """[S] rewards whose sum is near the lowest score: each times its share of softmax(-score / TEMPERATURE)."""
    weights = np.exp(-(scores - scores.min()) / TEMPERATURE)
    rewards: FloatArray = (scores * weights / weights.sum()).astype(np.float32)
    return rewards


@asynccontextmanager
async def open_steps(term: StepsTerm, context: ServeContext) -> AsyncIterator[ServedReward]:
    """The reward while its connections are open."""
    async with open_servers(term.urls, term.key, context) as servers:
        yield StepsReward(term, servers, context.decode)


STEPS = RewardKind(settings=StepsTerm, serve=open_steps)
