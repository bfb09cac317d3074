"""The term `steps`: a process reward model on SGLang scores each step of a response, all in one prefill.

The model reads the token ids of prompt and response, with a separator token after each step. At a separator it
predicts a label, good or bad; a step's score is the share of the good label. The call is SGLang's `/generate` with
no new tokens and log-probabilities of the labels. Credit by the minimum: PURE, arXiv 2504.15275.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Annotated, ClassVar, TypeAlias

import msgspec
import numpy as np
from pydantic import Field

from laminar_contrib.reward_models.judge import AskingTerm, Servers, check_urls, open_servers
from laminar_py.config.reward import RewardKind, ServeContext, ServedReward
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.scoring import NoValueError, Reward, ScoringRequest

TEMPERATURE = 0.1  # of the minimum


class StepCredit(StrEnum):
    """Ways to turn scores of steps into rewards of tokens."""

    RETURNS = "returns"
    MINIMUM = "minimum"


class StepsTerm(AskingTerm):
    """A reward for each step of a response, at its last token: how likely a process reward model finds it good.
    Any SGLang server of the model will do."""

    kind: str = "steps"
    separator_id: Annotated[int, Field(ge=0)]
    """Id of the model's token after each step, at which its next token is a label (Math-Shepherd's way); a model
    with a classification head in place of labels is not served. The model and the policy share a tokenizer."""
    labels: tuple[int, int]
    """Ids of the model's tokens for a good and for a bad step."""
    ends: str = "\n\n"
    """Text that ends a step; the end of the response ends the last one. It is looked for in the texts of single
    tokens, where some tokenizers leave out a space before a word."""
    credit: StepCredit = StepCredit.RETURNS
    """`returns`: a step's score is its reward, and what follows from a token counts for it. `minimum`: scores are
    weighted so that their sum is near the lowest, and a token's return is near the worst later score."""

    rounding: ClassVar[float] = 0.02  # of a bfloat16 model: 0.002 was seen in a step that was computed with others


LabelLogprob: TypeAlias = tuple[float, int, str | None]  # log-probability, the label's id, its text


class Logprobs(msgspec.Struct):
    """Log-probabilities of the labels at each given token after the first, and after the last given token."""

    input_token_ids_logprobs: list[list[LabelLogprob] | None]  # None for the first
    output_token_ids_logprobs: list[list[LabelLogprob]]


class Generated(msgspec.Struct):
    """Answer of `/generate`."""

    meta_info: Logprobs


class StepsReward:
    """Scores steps at the servers of a term."""

    def __init__(self, term: StepsTerm, servers: Servers, decode: Callable[[IntArray], str]) -> None:
        self._term = term
        self._servers = servers
        self._decode = decode
        self.concurrency = term.at_once

    async def __call__(self, request: ScoringRequest) -> Reward:
        """Return rewards [L]: the score of each step at its last token, and 0 elsewhere."""
        ids = request.response_ids
        ends = await asyncio.to_thread(step_ends, ids, self._decode, self._term.ends)
        if ends[-1:] != [len(ids) - 1]:
            ends.append(len(ids) - 1)
        scores = await self._ask_scores(request.prompt_ids, ids, ends)
        rewards = np.zeros(len(ids), np.float32)
        rewards[ends] = scores if self._term.credit is StepCredit.RETURNS else minimum_rewards(scores)
        return Reward(rewards, text="steps " + " ".join(f"{score:.3f}" for score in scores))

    async def _ask_scores(self, prompt: IntArray, ids: IntArray, ends: Sequence[int]) -> FloatArray:
        """Ask the server for scores [S] of the steps that end at `ends`."""
        term = self._term
        given = [*prompt.tolist(), *separated(ids, ends, term.separator_id)]
        places = [len(prompt) + end + 1 + number for number, end in enumerate(ends)]
        body = {
            "input_ids": given,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": places[0],
            "token_ids_logprob": term.labels,
        }
        found = (await self._servers.post_json("generate", body, Generated)).meta_info
        rows = found.input_token_ids_logprobs[1:] + found.output_token_ids_logprobs  # after `places[0]` and so on
        if len(rows) != len(given) - places[0]:
            raise NoValueError(f"the server answered {len(rows)} of {len(given) - places[0]} places")
        return np.array([self._good(rows[place - places[0]]) for place in places], np.float32)

    def _good(self, row: Sequence[LabelLogprob] | None) -> float:
        """Return the share of the good label in the probability of both labels."""
        by_label = {label: logprob for logprob, label, _ in row or ()}
        if not by_label.keys() >= set(self._term.labels):
            raise NoValueError(f"labels={self._term.labels}: the server answered {row}, which lacks a label")
        good, bad = (by_label[label] for label in self._term.labels)
        return float(np.exp(good - np.logaddexp(good, bad)))


def step_ends(ids: IntArray, decode: Callable[[IntArray], str], end: str) -> list[int]:
    """Return the position of the last token of each finished step: its text completes `end`."""
    ends, text = [], ""  # text: a tail that may still become part of `end`
    texts = {int(id): decode(np.array([id], np.int32)) for id in np.unique(ids)}
    for place, id in enumerate(ids.tolist()):
        text += texts[id]
        if end in text:
            ends.append(place)
            text = ""
        text = text[max(0, len(text) - len(end) + 1) :]
    return ends


def separated(ids: IntArray, ends: Sequence[int], separator: int) -> list[int]:
    """Insert the separator after each step."""
    given = np.insert(ids, np.array(ends) + 1, separator)
    return [int(id) for id in given]


def minimum_rewards(scores: FloatArray) -> FloatArray:
    """Return rewards [S] whose sum is near the lowest score: score * softmax(-score / TEMPERATURE)."""
    weights = np.exp(-(scores - scores.min()) / TEMPERATURE)
    rewards: FloatArray = (scores * weights / weights.sum()).astype(np.float32)
    return rewards


@asynccontextmanager
async def open_steps(term: StepsTerm, context: ServeContext) -> AsyncIterator[ServedReward]:
    """Open the connections of the term."""
    async with open_servers(term, context) as servers:
        yield StepsReward(term, servers, context.decode)


STEPS = RewardKind(settings=StepsTerm, serve=open_steps, check=check_urls)
