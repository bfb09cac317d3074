"""Drafts: tokens that a response may continue with, from other texts of its prompt. Owned by the scheduler.

Speculation changes no token. A token depends on the logits and on a number that its request and place give alone
(`sampling`), so a forward over a draft draws the tokens that single steps would draw, up to rounding of the logits
(`tests/engines/local/test_speculation.py`). The scheduler keeps the tokens up to the first that the draft lacks.

    follow -> choose -> propose -> a forward over the drafts -> record_accepted -> record_step ... -> keep, forget

Texts of a prompt are its responses under way, and its last finished ones, whatever weights sampled them. A draft
continues the text in which the last tokens of the response occur, the longest run first. They are strings with a
character for each token, since no search is faster than `str.rfind`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

import numpy as np

from laminar_py.engines.local.attention import Drafts
from laminar_py.engines.local.corpus import Corpus, characters
from laminar_py.engines.local.draft_choice import MEMORY, DraftChoice, Numbers, StepTimes
from laminar_py.engines.local.kv import Indices
from laminar_py.engines.local.prefill import Job
from laminar_py.engines.local.slots import Slots
from laminar_py.records.codec import IntArray
from laminar_py.records.engine import DraftCounts, GenerateRequest

MOST_DRAFT = 15  # tokens of a sequence; so it grows by less than a block of the KV cache in one step
MOST_FED = 256  # tokens of one step, whose logits are all in memory
FIRST_DRAFT = 3  # tokens, until steps of two sizes have been measured
SHORTEST, LONGEST = 2, 8  # tokens that a text has in common with a response when a draft continues it
PATIENCE, MOST_PATIENCE = 4, 32  # tokens until a response without such a text looks again; they double each time
WARM_UP = 3  # first steps of each way, which compile it
_START = "\U0010ffff"  # stands before each text; no vocabulary has so many tokens


class Origin(IntEnum):
    """Text that a draft is from; see `DraftCounts`."""

    OWN = 0
    SIBLING = 1
    EARLIER = 2


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of a prompt at one time, end to end, each after `_START`, and one more `_START`."""

    text: str
    num_earlier: int  # tokens of finished responses, which come first
    own: dict[Job, range]  # places of each response under way

    def find(self, last: str) -> tuple[int, int] | None:
        """Find the longest run of tokens that ends `last` and stands before another token; of equal ones the last.

        Returns the place of the token after it, and the number of its tokens.
        """
        for match in range(len(last), min(SHORTEST, len(last)) - 1, -1):
            place = len(self.text) - 1
            while (place := self.text.rfind(last[-match:], 0, place)) >= 0:
                if self.text[place + match] != _START:
                    return place + match, match
                place += match - 1
        return None

    def rest(self, place: int, stops: Sequence[str]) -> str:
        """Return the tokens of a text from `place` on, at most to the first of `stops`."""
        rest = self.text[place : self.text.index(_START, place)]
        ends = [end for stop in stops if (end := rest.find(stop)) >= 0]
        return rest[: min(ends) + 1] if ends else rest


@dataclass(slots=True, kw_only=True)
class Followed:
    """A response, and its expected continuation, empty if there is none."""

    prompt: bytes
    has_earlier: bool  # its prompt had finished responses when it began to decode
    looks_at: int = 0  # length from which it looks for a text
    patience: int = PATIENCE  # tokens until then after a look in vain
    text: str = ""  # the response
    rest: str = ""
    match: int = 0  # tokens in common, at most `LONGEST`
    origin: Origin = Origin.OWN

    def catch_up(self, response: IntArray) -> None:
        """Add the tokens since the last call; the continuation is what follows them, if they began it."""
        grown = characters(response[len(self.text) :])
        self.text += grown
        if self.rest.startswith(grown):
            self.rest = self.rest[len(grown) :]
            self.match = min(self.match + len(grown), LONGEST)
        else:
            self.rest = ""


class Drafter:
    """Drafts for the requests that decode in `slots`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._corpus = Corpus()
        self._followed: dict[Job, Followed] = {}
        self._num_with_earlier = 0  # of the followed jobs
        self._shares: Numbers = np.full(LONGEST + 1, 0.8)  # accepted tokens among reached ones, by match
        # by rows as a power of two, and whether half of the rows have earlier responses to draft from
        self._choices: defaultdict[tuple[int, bool], DraftChoice] = defaultdict(DraftChoice)
        self._choice = DraftChoice()  # of the present step
        self._times = StepTimes()
        self._num_steps = {False: 0, True: 0}  # without drafts and with drafts
        self._counts = np.zeros((2, len(Origin)), np.int64)  # drafted and accepted tokens
        self._num_verified = self._num_near = 0  # as in `DraftCounts`
        self._proposed: list[tuple[int, Origin]] = []  # match and origin of each row in the present step

    @property
    def counts(self) -> DraftCounts:
        """Draft tokens so far. Safe to call from any thread."""
        drafted, accepted = self._counts.tolist()
        names = [origin.name.lower() for origin in Origin]
        return DraftCounts(
            **{f"drafted_{name}": count for name, count in zip(names, drafted, strict=True)},
            **{f"accepted_{name}": count for name, count in zip(names, accepted, strict=True)},
            verified=self._num_verified,
            near=self._num_near,
        )

    @property
    def corpus_bytes(self) -> int:
        """Memory of the finished responses that are kept. Safe to call from any thread."""
        return self._corpus.num_bytes

    @property
    def speedups(self) -> dict[int, float]:
        """Speed-up by drafts as in `EngineStatus`. Safe to call from any thread."""
        known = [(kind, choice) for kind, choice in self._choices.copy().items() if choice.trials]
        known.sort(key=lambda item: item[1].used)
        most_used = {bits: choice.speedup for (bits, _), choice in known}
        return {1 << (bits - 1): round(most_used[bits], 3) for bits in sorted(most_used)}

    def choose(self, num_rows: int) -> bool:
        """Begin a step of so many rows, and return True if it should draft."""
        self._choice = self._choices[num_rows.bit_length(), 2 * self._num_with_earlier >= num_rows]
        return self._choice.advance()

    def follow(self, job: Job) -> None:
        """Note that a job begins to decode."""
        prompt = _digest(job.request.prompt_ids)
        self._followed[job] = Followed(prompt=prompt, has_earlier=self._corpus.has(prompt))
        self._num_with_earlier += self._followed[job].has_earlier

    def propose(self, jobs: Sequence[Job], limits: Sequence[int]) -> Drafts | None:
        """Draft at most `limits[i]` tokens to follow the response of job i; None if no draft pays."""
        drafts = self._find(jobs, limits)
        if not (longest := max(map(len, drafts))):
            return None
        followed = [self._followed[job] for job in jobs]
        self._proposed = [(one.match, one.origin) for one in followed]
        steps = np.arange(1, longest + 1)
        is_drafted = steps <= np.array([[len(draft)] for draft in drafts])  # [rows, tokens]
        accepted = self._shares[[one.match for one in followed], None] ** steps * is_drafted
        fed = len(jobs) + np.append(0, is_drafted.sum(0).cumsum())  # by the most tokens of a draft, from 0 on
        gained = len(jobs) + np.append(0.0, accepted.sum(0).cumsum())
        seconds = self._times.at(fed)
        most = FIRST_DRAFT if seconds is None else int((gained / seconds).argmax())
        most = min(most, int(np.searchsorted(fed, MOST_FED, side="right")) - 1)
        return Drafts.build([draft[:most] for draft in drafts]) if most > 0 else None

    def record_accepted(self, counts: Indices, accepted: Indices, *, near: int) -> None:
        """Take how many tokens of the last proposal's drafts, `counts [B]`, were sampled.

        The numbers of `near` sampled tokens lie near a boundary.
        """
        self._num_verified += len(counts) + int(accepted.sum())
        self._num_near += near
        for (match, origin), drafted, count in zip(
            self._proposed, counts.tolist(), accepted.tolist(), strict=True
        ):
            if drafted:
                tried = min(drafted, count + 1)  # the first token that was not sampled ends a draft
                self._shares[match] += tried / (MEMORY + tried) * (count / tried - self._shares[match])
                self._counts[:, origin] += (drafted, count)

    def record_step(self, num_rows: int, drafts: Drafts | None, gained: int, *, seconds: float) -> None:
        """Take a step of so many rows that gained tokens in `seconds` of its thread."""
        has_drafts = drafts is not None
        self._num_steps[has_drafts] += 1
        if self._num_steps[has_drafts] <= WARM_UP:
            return
        self._choice.add(gained, seconds)
        self._times.add(num_rows + (0 if drafts is None else len(drafts.ids)), seconds)

    def keep(self, job: Job, response: IntArray, *, version: int) -> None:
        """Keep the finished `response` under `version`, of the last turn so far, for others to its prompt."""
        followed = self._followed.get(job)
        prompt = _digest(job.request.prompt_ids) if followed is None else followed.prompt
        self._corpus.add(job.request.rid, prompt, response, version=version)

    def take_earlier(self, request: GenerateRequest) -> None:
        """Keep the responses of other engines that a request brings, unless it has them."""
        prompt = _digest(request.prompt_ids) if request.earlier else b""
        for text in request.earlier:
            if not self._corpus.has_response(text.rid):
                self._corpus.add(text.rid, prompt, text.ids.copy(), version=text.version)
        for followed in self._followed.values() if request.earlier else ():  # siblings that began before
            if followed.prompt == prompt and not followed.has_earlier:
                followed.has_earlier = True
                self._num_with_earlier += 1

    def drop_stale(self, version: int) -> None:
        """Drop finished responses that are too old beside `version`, which is served from now on."""
        self._corpus.drop_stale(version)

    def forget(self, job: Job) -> None:
        """Forget a job that no longer decodes, if it did."""
        if (followed := self._followed.pop(job, None)) is not None:
            self._num_with_earlier -= followed.has_earlier

    def _find(self, jobs: Sequence[Job], limits: Sequence[int]) -> list[list[int]]:
        """Return at most `limits[i]` tokens that may follow the response of job i."""
        by_prompt: dict[bytes, Texts] = {}
        drafts: list[list[int]] = []
        for job in jobs:
            self._followed[job].catch_up(self._slots.ids[job.slot, : self._slots.num_response[job.slot]])
        for job, limit in zip(jobs, limits, strict=True):
            followed = self._followed[job]
            if not followed.rest and len(followed.text) >= followed.looks_at:
                if (texts := by_prompt.get(followed.prompt)) is None:
                    texts = by_prompt[followed.prompt] = self._texts(followed.prompt)
                self._look(job, followed, texts)
            drafts.append([ord(token) for token in followed.rest[: max(0, limit)]])
        return drafts

    def _look(self, job: Job, followed: Followed, texts: Texts) -> None:
        """Find the text that a response follows, or wait some tokens until the next look."""
        if (found := texts.find((_START + followed.text)[-LONGEST:])) is None:
            followed.looks_at = len(followed.text) + followed.patience
            followed.patience = min(2 * followed.patience, MOST_PATIENCE)
            return
        (place, followed.match), followed.patience = found, PATIENCE
        followed.rest = texts.rest(place, [chr(token) for token in job.request.sampling.stop_ids])
        is_own = place in texts.own.get(job, ())
        is_earlier = place < texts.num_earlier
        followed.origin = Origin.EARLIER if is_earlier else Origin.OWN if is_own else Origin.SIBLING

    def _texts(self, prompt: bytes) -> Texts:
        """Join the texts of a prompt: its finished responses, then its responses under way."""
        found = ["", *self._corpus.of(prompt)]
        end = num_earlier = sum(1 + len(text) for text in found[1:])
        own: dict[Job, range] = {}
        for job, followed in self._followed.items():
            if followed.prompt == prompt:
                found.append(followed.text)
                own[job] = range(end + 1, end + 1 + len(followed.text))
                end += 1 + len(followed.text)
        return Texts(_START.join([*found, ""]), num_earlier, own)


def _digest(prompt_ids: IntArray) -> bytes:
    """Return the name of a prompt in the corpus."""
    return blake2b(prompt_ids.tobytes(), digest_size=16).digest()
