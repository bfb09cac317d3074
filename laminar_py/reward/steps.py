"""The term `steps`: a process reward model on SGLang scores each step of a response, all in one prefill.

The model reads the token ids of prompt and response, with a separator token after each step. At a separator it
predicts a label, good or bad; a step's score is the share of the good label. The call is SGLang's `/generate` with
no new tokens and log-probabilities of the labels. Finished steps are scored while the response still generates,
and the rest at its end; a server with a prefix cache computes nothing twice. Credit by the minimum: PURE, arXiv
2504.15275.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3
from pydantic import Field

from laminar_py.config.reward import RewardKind, ServeContext, ServedReward
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.scoring import NoValueError, PartialResponse, Reward, ScoringRequest
from laminar_py.reward.judge import AskingTerm, Servers, open_servers

TEMPERATURE = 0.1  # of the minimum
KEPT = 4096  # unfinished responses whose step scores we keep


class StepCredit(StrEnum):
    """Ways to turn scores of steps into rewards of tokens."""

    RETURNS = "returns"
    MINIMUM = "minimum"


class StepsTerm(AskingTerm):
    """A reward for each step of a response, at its last token: how likely a process reward model finds it good.
    Any SGLang server of the model will do, best with its prefix cache on."""

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

    looks_ahead: ClassVar[bool] = True  # finished steps are scored while the response still generates
    rounding: ClassVar[float] = 0.02  # of a bfloat16 model: 0.002 was seen in a step that was computed with others


LabelLogprob: TypeAlias = tuple[float, int, str | None]  # log-probability, the label's id, its text


class Logprobs(msgspec.Struct):
    """Log-probabilities of the labels: of what follows each given token but the last, and of what follows that."""

    input_token_ids_logprobs: list[list[LabelLogprob] | None]  # None for the first
    output_token_ids_logprobs: list[list[LabelLogprob]]


class Generated(msgspec.Struct):
    """Answer of `/generate`."""

    meta_info: Logprobs


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a response and their scores, e.g. `Steps([4, 9], [0.8, 0.3], digest)` of its first 10 tokens."""

    ends: list[int]  # [S] places of their last tokens
    scores: FloatArray  # [S]
    digest: bytes = b""  # of the prompt and these tokens


NO_STEPS = Steps([], np.empty(0, np.float32))


class StepsReward:
    """Scores steps at the servers of a term."""

    def __init__(self, term: StepsTerm, servers: Servers, decode: Callable[[IntArray], str]) -> None:
        self._term = term
        self._servers = servers
        self._decode = decode
        self._known = OrderedDict[str, Steps]()  # by trajectory
        self.concurrency = term.at_once

    async def __call__(self, request: ScoringRequest) -> Reward:
        """Return rewards [L]: the score of each step at its last token, and 0 elsewhere."""
        steps = await self._score(request, finished=True)
        self._known.pop(request.trajectory_id, None)
        rewards = np.zeros(len(request.response_ids), np.float32)
        scores = steps.scores
        rewards[steps.ends] = scores if self._term.credit is StepCredit.RETURNS else minimum_rewards(scores)
        return Reward(rewards, text="steps " + " ".join(f"{score:.3f}" for score in scores))

    async def look_ahead(self, response: PartialResponse) -> None:
        """Score the finished steps of a response that still generates, and keep the scores until its end."""
        self._known[response.trajectory_id] = await self._score(response, finished=False)
        self._known.move_to_end(response.trajectory_id)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)

    async def _score(self, of: ScoringRequest | PartialResponse, *, finished: bool) -> Steps:
        """Return all steps of a response so far. Asks the server only for steps that have no score yet."""
        known, prompt, ids = self._known.get(of.trajectory_id, NO_STEPS), of.prompt_ids, of.response_ids
        length = known.ends[-1] + 1 if known.ends else 0
        if known.digest != _digest(prompt, ids[:length]):
            known, length = NO_STEPS, 0
        ends = await asyncio.to_thread(step_ends, ids[length:], self._decode, self._term.ends)
        new = [length + end for end in ends]
        if finished and (known.ends + new)[-1:] != [len(ids) - 1]:
            new.append(len(ids) - 1)
        if not new:
            return known
        scores = await self._ask_scores(prompt, ids[: new[-1] + 1], known.ends, new)
        return Steps(known.ends + new, np.append(known.scores, scores), _digest(prompt, ids[: new[-1] + 1]))

    async def _ask_scores(
        self, prompt: IntArray, ids: IntArray, before: Sequence[int], ends: Sequence[int]
    ) -> FloatArray:
        """Ask the server for scores [S] of the steps that end at `ends`; scored steps of `ids` end at `before`."""
        term = self._term
        given = [*prompt.tolist(), *separated(ids, [*before, *ends], term.separator_id)]
        places = [len(prompt) + end + 1 + number for number, end in enumerate(ends, start=len(before))]
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
            raise NoValueError(f"{len(given) - places[0]} places were asked about, the answer has {len(rows)}")
        return np.array([self._good(rows[place - places[0]]) for place in places], np.float32)

    def _good(self, row: Sequence[LabelLogprob] | None) -> float:
        """Return the share of the good label in the probability of both labels."""
        by_label = {label: logprob for logprob, label, _ in row or ()}
        if not by_label.keys() >= set(self._term.labels):
            raise NoValueError(f"labels={self._term.labels} were asked for, the answer has {row}")
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


def _digest(prompt: IntArray, ids: IntArray) -> bytes:
    """Hash a prompt and the beginning of its response; b"" if the response is empty."""
    return blake3(prompt.tobytes() + ids.tobytes()).digest(length=16) if len(ids) else b""


@asynccontextmanager
async def open_steps(term: StepsTerm, context: ServeContext) -> AsyncIterator[ServedReward]:
    """Open the connections of the term."""
    async with open_servers(term, context) as servers:
        yield StepsReward(term, servers, context.decode)


STEPS = RewardKind(settings=StepsTerm, serve=open_steps)
