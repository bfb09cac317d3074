"""Samples on which a user tries a reward before a run: a problem, a response, and perhaps the expected reward."""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest

import msgspec
import numpy as np

from laminar_py.config import ConfigError
from laminar_py.records.codec import IntArray
from laminar_py.records.scoring import Score, ScoringRequest, Unscored
from laminar_py.records.trajectory import FinishReason
from laminar_py.reward import Scorer

TAKE_S = 1.0


class SampleLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a samples file. Its other fields belong to the problem."""

    response: str
    prompt: str = ""
    answer: str | int | float = ""  # a number counts as its text
    task: str = ""
    finish_reason: FinishReason = FinishReason.STOP
    reward: float | None = None  # the expected reward


@dataclass(frozen=True, slots=True)
class SampleToScore:
    """A response to score, and its expected reward, if known."""

    place: str  # e.g. `samples=s.jsonl:7`
    request: ScoringRequest
    wanted: float | None

    def disagreement(self, score: Score) -> str | None:
        """Return a line for the user if the reward differs from the expected one, else None."""
        if self.wanted is None or score.value is None or abs(score.value - self.wanted) <= 1e-6:
            return None
        said = "; ".join(f"{term.name} {term.value:g} {term.text}".strip() for term in score.terms)
        return f"{self.place}: reward {score.value:g}, wanted {self.wanted:g} ({said})"


def make_sample(
    place: str,
    line: SampleLine,
    fields_json: bytes,
    *,
    answer: str,
    encode: Callable[[str], IntArray],
    decode: Callable[[IntArray], str],
    end: int,
) -> SampleToScore:
    """Make a sample from a line, with its `answer` as text.

    `encode` turns text into token ids and `decode` back. `end` is the last id of a response that ended by itself.
    Raises `ConfigError` if the tokenizer cannot represent the response.
    """
    ids = encode(line.response)
    _check_text(place, line.response, decode(ids))
    if line.finish_reason is FinishReason.STOP:
        ids = np.append(ids, end).astype(np.int32)
    request = ScoringRequest(
        trajectory_id=place,
        prompt=line.prompt,
        response="",
        answer=answer,
        task=line.task,
        finish_reason=line.finish_reason,
        prompt_ids=encode(line.prompt),
        response_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        fields_json=fields_json,
    )
    return SampleToScore(place, request, line.reward)


def _check_text(place: str, text: str, scored: str) -> None:
    """Raise `ConfigError` if the tokenizer lost characters, because then the reward would score another text."""
    if scored == text:
        return
    at = next(index for index, (a, b) in enumerate(zip_longest(text, scored)) if a != b)
    raise ConfigError(
        f"{place}: the tokenizer of model.path makes another text of the response, from {text[at : at + 1]!r}"
        f" at character {at + 1} on; leave out the characters that it has no ids for, or set"
        " model.path to another model"
    )


async def score_all(scorer: Scorer, requests: Iterable[ScoringRequest]) -> AsyncIterator[Score]:
    """Score requests with unique ids, as many at a time as the scorer works on, and yield scores as they come."""
    waiting, in_hand, left = iter(requests), 0, True
    while left or in_hand:
        while left and in_hand < scorer.concurrency:
            request = next(waiting, None)
            left = request is not None
            if request is not None:
                scorer.submit_responses([Unscored(request=request)])
                in_hand += 1
        for score in await scorer.next_scores(TAKE_S) if in_hand else []:
            in_hand -= 1
            yield score
