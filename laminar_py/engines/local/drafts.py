"""Drafts: tokens that a response may continue with, from other texts of its prompt. Owned by the scheduler.

Speculation changes no token. A token depends on the logits and on a number that its request and place give alone
(`sampling`), so a forward over a draft draws the tokens that single steps would draw, up to rounding of the logits
(`tests/engines/local/test_speculation.py`). The scheduler keeps the tokens up to the first that the draft lacks.

    propose -> a forward over the drafts -> accept -> propose ... -> finished, left

Texts of a prompt are its responses under way, and its last finished ones, whatever weights sampled them. A draft
continues the text in which the last tokens of the response occur, the longest run first.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from laminar_py.engines.local.attention import Drafts
from laminar_py.engines.local.prefill import Job
from laminar_py.engines.local.slots import Slots
from laminar_py.records.codec import IntArray
from laminar_py.records.engine import DraftCounts

MOST_DRAFT = 15  # tokens; a sequence grows by less than a block of the KV cache in one step
SHORTEST, LONGEST = 2, 8  # tokens that a text has in common with a response when a draft continues it
PATIENCE = 4  # tokens after which a response without such a text looks again
MOST_TOKENS = 2**20  # of finished responses that are kept
MOST_FINISHED = 16  # responses that are kept of one prompt
MEMORY = 32  # steps over which times and rates are averaged
TRIAL, TRIAL_EVERY = 4, 128  # steps of the other way, drafts or none, after as many steps of the faster way
WARM_UP = 3  # first steps of each way, which compile it
_START = -1  # stands before each text

Numbers = npt.NDArray[np.float64]


class Origin(StrEnum):
    """Text that a draft is from; see `DraftCounts`."""

    OWN = "own"
    SIBLING = "sibling"
    EARLIER = "earlier"


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of a prompt at one time, end to end, each after `_START`."""

    ids: IntArray  # [n]
    num_earlier: int  # tokens of finished responses, which come first
    parts: dict[int, range]  # by slot, the places of its response

    def find(self, last: Sequence[int]) -> tuple[int, int] | None:
        """Find the longest run of tokens that ends `last` and stands before another token; of equal ones the last.

        Returns the place of the token after it, and the number of its tokens.
        """
        places = np.flatnonzero(self.ids[:-1] == last[-1])
        places = places[self.ids[places + 1] != _START]
        match = 1
        while match < len(last) and places.size:
            longer = places[self.ids[places - match] == last[-1 - match]]
            if not longer.size:
                break
            places, match = longer, match + 1
        if not places.size or match < min(SHORTEST, len(last)):
            return None
        return int(places[-1]) + 1, min(match, LONGEST)

    def origin(self, place: int, slot: int) -> Origin:
        """Return whose text has `place`, for the response in `slot`."""
        if place < self.num_earlier:
            return Origin.EARLIER
        return Origin.OWN if place in self.parts.get(slot, ()) else Origin.SIBLING


@dataclass(slots=True, kw_only=True)
class Followed:
    """A response, and the text that it follows, if any: token `length` of it is expected to be `ids[place]`."""

    prompt: bytes
    looks_at: int = 0  # length from which it looks for a text
    texts: Texts | None = None
    place: int = 0
    length: int = 0
    match: int = 0  # tokens in common, at most `LONGEST`

    def catch_up(self, response: IntArray) -> bool:
        """Move on over the tokens since the last call; return False, and leave the text, if they differ."""
        if self.texts is None:
            return False
        grown = response[self.length :]
        expected = self.texts.ids[self.place : self.place + len(grown) + 1]
        if len(expected) == len(grown) + 1 and expected[-1] != _START and np.array_equal(grown, expected[:-1]):
            self.place, self.length = self.place + len(grown), len(response)
            self.match = min(self.match + len(grown), LONGEST)
            return True
        self.texts = None
        return False


@dataclass(slots=True)
class Average:
    """Sums over steps, of which older ones weigh less."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Add a step."""
        kept = 1 - 1 / MEMORY
        self.weight = kept * self.weight + 1
        self.tokens = kept * self.tokens + tokens
        self.seconds = kept * self.seconds + seconds


@dataclass(slots=True)
class Choice:
    """Choice between drafts and none at some number of rows, by the rates that both had there."""

    drafts: Average = field(default_factory=Average)
    plain: Average = field(default_factory=Average)
    steps: int = 0  # since the last trial

    def next(self) -> bool:
        """Return True if the next step should draft."""
        if not self.plain.weight or not self.drafts.weight:
            return self.plain.weight > 0
        is_faster = self.drafts.tokens * self.plain.seconds > self.plain.tokens * self.drafts.seconds
        self.steps = (self.steps + 1) % (TRIAL_EVERY + TRIAL)
        return is_faster if self.steps < TRIAL_EVERY else not is_faster


class StepTimes:
    """Time of a step as a line over the number of its queries, padding included, by the last steps."""

    def __init__(self) -> None:
        self._sums: Numbers = np.zeros(5)  # weight, queries, seconds, queries squared, queries times seconds

    def add(self, queries: int, seconds: float) -> None:
        """Add a step."""
        self._sums *= 1 - 1 / MEMORY
        self._sums += (1, queries, seconds, queries * queries, queries * seconds)

    def at(self, queries: Numbers) -> Numbers:
        """Return seconds [n] of steps by their number of queries [n]; equal while all steps had one size."""
        weight, total, seconds, squares, products = self._sums.tolist()
        spread = weight * squares - total * total
        if spread <= 1e-3 * weight * weight:
            return np.ones_like(queries)
        slope = max(0.0, (weight * products - total * seconds) / spread)
        mean = seconds / weight
        line: Numbers = mean + slope * (queries - total / weight)
        return line.clip(0.1 * mean)


class Drafter:
    """Drafts for the requests that decode in `slots`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._finished: OrderedDict[bytes, deque[IntArray]] = OrderedDict()  # by prompt; the last used last
        self._num_kept = 0  # their tokens
        self._followed: dict[Job, Followed] = {}
        self._shares: Numbers = np.full(LONGEST + 1, 0.8)  # accepted tokens among reached ones, by match
        self._choices: defaultdict[int, Choice] = defaultdict(Choice)  # by the bits of a step's rows
        self._times = StepTimes()
        self._num_steps = {False: 0, True: 0}  # without drafts and with drafts
        self.counts = DraftCounts()  # other threads read it

    def wants(self, num_rows: int) -> bool:
        """Return True if a step of so many rows should draft."""
        return self._choices[num_rows.bit_length()].next()

    def took(self, num_rows: int, drafts: Drafts | None, gained: int, seconds: float, *, tried: bool) -> None:
        """Take a step that gained tokens in `seconds` of its thread; `tried` to draft, perhaps without success."""
        self._num_steps[drafts is not None] += 1
        if self._num_steps[drafts is not None] <= WARM_UP:
            return
        choice = self._choices[num_rows.bit_length()]
        (choice.drafts if tried else choice.plain).add(gained, seconds)
        self._times.add(num_rows * (1 if drafts is None else 1 + int(drafts.counts.max())), seconds)

    def propose(self, jobs: Sequence[Job], limits: Sequence[int]) -> Drafts | None:
        """Draft at most `limits[i]` tokens to follow the response of job i; None if no draft pays."""
        drafts = self._find(jobs, limits)
        if not (longest := max(map(len, drafts))):
            return None
        matches = [self._followed[job].match for job in jobs]
        steps = np.arange(1, longest + 1)
        # [rows, tokens] probability that a token is accepted
        reached = self._shares[matches, None] ** steps
        reached[steps > np.array([[len(draft)] for draft in drafts])] = 0
        gained = len(jobs) + np.append(0.0, reached.sum(0).cumsum())
        most = int((gained / self._times.at(len(jobs) * np.arange(1.0, longest + 2))).argmax())
        return Drafts.build([draft[:most] for draft in drafts]) if most else None

    def accept(self, job: Job, drafted: int, accepted: int) -> None:
        """Take how many tokens of a draft were sampled; the first that was not ends it."""
        followed, tried = self._followed[job], min(drafted, accepted + 1)
        assert followed.texts is not None, "a draft is from a text"
        share = self._shares[followed.match]
        self._shares[followed.match] += tried / (MEMORY + tried) * (accepted / tried - share)
        origin = followed.texts.origin(followed.place, job.slot)
        found = DraftCounts(**{f"drafted_{origin}": drafted, f"accepted_{origin}": accepted})
        self.counts = self.counts.plus(found)

    def finished(self, job: Job, response: IntArray) -> None:
        """Keep a finished response for other responses to its prompt."""
        prompt = job.request.prompt_ids.tobytes()
        kept = self._finished.setdefault(prompt, deque())
        self._finished.move_to_end(prompt)
        kept.append(response)
        self._num_kept += len(response)
        if len(kept) > MOST_FINISHED:
            self._num_kept -= len(kept.popleft())
        while self._num_kept > MOST_TOKENS:
            _, others = self._finished.popitem(last=False)
            self._num_kept -= sum(map(len, others))

    def left(self, job: Job) -> None:
        """Forget a job that no longer decodes."""
        self._followed.pop(job, None)

    def _find(self, jobs: Sequence[Job], limits: Sequence[int]) -> list[list[int]]:
        """Return at most `limits[i]` tokens that may follow the response of job i."""
        by_prompt: dict[bytes, Texts] = {}
        drafts: list[list[int]] = []
        for job, limit in zip(jobs, limits, strict=True):
            followed = self._followed.get(job)
            if followed is None:
                followed = self._followed[job] = Followed(prompt=job.request.prompt_ids.tobytes())
            response = self._slots.ids[job.slot, : self._slots.num_response[job.slot]]
            if not followed.catch_up(response) and len(response) >= followed.looks_at:
                texts = by_prompt.get(followed.prompt) or self._texts(followed.prompt)
                by_prompt[followed.prompt] = texts
                if found := texts.find([_START, *response[-LONGEST:].tolist()]):
                    followed.texts, followed.length = texts, len(response)
                    followed.place, followed.match = found
                else:
                    followed.looks_at = len(response) + PATIENCE
            if followed.texts is None:
                drafts.append([])
                continue
            draft: list[int] = followed.texts.ids[followed.place : followed.place + max(0, limit)].tolist()
            drafts.append(draft[: draft.index(_START)] if _START in draft else draft)
        return drafts

    def _texts(self, prompt: bytes) -> Texts:
        """Join the texts of a prompt: its finished responses, then its responses under way."""
        start = np.array([_START], np.int32)
        found = [part for response in self._finished.get(prompt, ()) for part in (start, response)]
        num_earlier = end = sum(map(len, found))
        parts: dict[int, range] = {}
        for job, followed in self._followed.items():
            if followed.prompt == prompt:
                response = self._slots.ids[job.slot, : self._slots.num_response[job.slot]]
                parts[job.slot] = range(end + 1, end + 1 + len(response))
                found += (start, response)
                end += 1 + len(response)
        return Texts(np.concatenate([*found, start]), num_earlier, parts)
