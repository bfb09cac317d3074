"""Check of a run's draws: no place of the stream is skipped or repeated, and no prompt of an epoch (law 13).

`Draws` sees each group once, in the order of issue: first those on record, then new ones. It keeps one bit per row
and knows nothing of seeds and permutations, so it follows from the rows that were drawn alone:

- Groups have the places 0, 1, 2, ..., also across a resume. A rollback and a refill issue no place again.
- Each block of places has every source as often as its weight says (`stream.SLOTS`).
- `shuffled`: a source draws each row once before it draws any row again.
- `curriculum`: the same within the open levels, while their number stays. Draws on record say nothing of it.
- `shuffled`: neither long nor short rows are drawn more often than others (`SizeTest`), and `look_ahead` finds a
  wrong order of the next draws before the first of them.
- `signal`: a row rests only after a draw, so the first epoch of a source draws every row at least once. Later ones
  choose by rewards and chance, so they have no exact rule.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from laminar_py.config.data import DataConfig, PromptOrder
from laminar_py.data.stream import SLOTS

AHEAD = 512  # places that are checked before they are drawn
LEAST_EXPECTED = 20  # draws below which a normal test does not hold
REMEDY = "stop the run: what it trains on is not what data.train says"


class SourceRows(Protocol):
    """The rows of a source, e.g. a `ProblemSet`."""

    def __len__(self) -> int: ...

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """[n] bytes of each row."""
        ...

    def find(self, id: str) -> int | None:
        """Return the row of a prompt, None if the source does not have it."""
        ...

    def id(self, place: int) -> str:
        """Return the prompt of a row."""
        ...


class Epoch:
    """Rows of a source that its present epoch has drawn, e.g. 2 of 3: `Epoch(3)` after `add(0)`, `add(2)`."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.clear()

    def clear(self) -> None:
        """Begin an epoch."""
        self._bits = bytearray(-(-self._num_rows // 8))
        self.num_drawn = 0

    def add(self, row: int) -> bool:
        """Add a draw; return whether it is the first of its row."""
        byte, bit = row >> 3, 1 << (row & 7)
        is_new = not self._bits[byte] & bit
        self._bits[byte] |= bit
        self.num_drawn += is_new
        return is_new

    @property
    def missing(self) -> int | None:
        """The first row that was not drawn; None if all were."""
        rows = range(self._num_rows)
        return next((row for row in rows if not self._bits[row >> 3] & 1 << (row & 7)), None)


class SizeTest:
    """Compares the sizes of a source's last draws with the sizes [n] of all its rows.

    The shares of the longest and the shortest tenth, and of the longer half, must be within `SIGMAS` of what rows
    in random order have; in a sound run one test in 10^11 errs.
    """

    WINDOW, EVERY = 1024, 64  # draws
    SIGMAS = 7.0

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        self._sizes = sizes
        self._last: deque[int] = deque(maxlen=self.WINDOW)  # rows
        self._count = 0

    @cached_property
    def _parts(self) -> list[tuple[str, npt.NDArray[np.bool_], float]]:
        """Words on each part of the rows, which rows are in it, and their share."""
        short, half, long = np.quantile(self._sizes, (0.1, 0.5, 0.9), method="nearest")
        parts = {
            f"of at most {short} bytes": self._sizes <= short,
            f"above {half} bytes": self._sizes > half,
            f"of at least {long} bytes": self._sizes >= long,
        }
        return [(name, belongs, float(belongs.mean())) for name, belongs in parts.items()]

    def add(self, row: int) -> str:
        """Add a draw; return the fault of the last draws, or ""."""
        self._last.append(row)
        self._count += 1
        if self._count % self.EVERY:
            return ""
        rows, count = np.array(self._last), len(self._last)
        for name, belongs, share in self._parts:
            if count * min(share, 1 - share) < LEAST_EXPECTED:
                continue
            drawn = int(belongs[rows].sum())
            if abs(drawn - count * share) > self.SIGMAS * (count * share * (1 - share)) ** 0.5:
                return f"{drawn} of the last {count} draws are rows {name}, and {share:.0%} of the rows are"
        return ""


class Draws:
    """Draws of one run. The first fault ends the check, since what follows from it is no fault of its own.

    `num_open(source)` is the number of rows that the order may draw now: of the open levels under `curriculum`.
    """

    def __init__(
        self, sources: Sequence[SourceRows], settings: DataConfig, *, num_open: Callable[[int], int]
    ) -> None:
        self.fault = ""
        self._sources = sources
        self._order = settings.order
        self._num_open = num_open
        total = sum(source.weight for source in settings.train)
        self._slots = [max(1, round(SLOTS * source.weight / total)) for source in settings.train]
        self._block = sum(self._slots)  # places
        self._in_block = [0] * len(sources)  # draws of each source
        self._next = 0  # place
        self._drawn = [0] * len(sources)  # draws of each source, since the start of the run
        self._epochs = [Epoch(len(source)) for source in sources]
        self._sizes = [SizeTest(source.sizes) for source in sources]
        self._last_on_record: deque[tuple[int, str]] = deque(maxlen=AHEAD)  # place, prompt
        self._open = [0] * len(sources)  # rows that were open at each source's last draw

    def replay(self, record: Iterable[tuple[str, int, str]]) -> str:
        """Add the groups on record, each as (group, place, prompt); return their first fault, or ""."""
        for group, place, prompt in record:
            self._add(group, place, prompt, on_record=True)
            self._last_on_record.append((place, prompt))
        return self.fault

    def look_ahead(self, prompt_at: Callable[[int], str]) -> str:
        """Compare the last draws on record with what `prompt_at` now gives for their places, and check the next
        `AHEAD` places before they are drawn; return the fault. Only `shuffled` knows its draws ahead."""
        if (
            self.fault or not self._sources or self._order is not PromptOrder.SHUFFLED
        ):  # an evaluation has no source
            return self.fault
        for place, prompt in self._last_on_record:
            if prompt_at(place) != prompt:
                now = f"place {place} drew {prompt} on record, and would now draw {prompt_at(place)}"
                self.fault = f"{now}; {REMEDY}"
                return self.fault
        shared = (self._sources, self._num_open)  # what the copy does not change
        ahead = deepcopy(self, {id(part): part for part in shared})
        for place in range(self._next, self._next + AHEAD):
            if fault := ahead.issued(f"g{place}", place, prompt_at(place)):
                self.fault = f"ahead of the first draw: {fault}"
                break
        return self.fault

    def issued(self, group: str, place: int, prompt: str) -> str:
        """Add a new group, e.g. `issued("g40", 40, "p7")`; return its fault, or "" if it is not the first."""
        return "" if self.fault else self._add(group, place, prompt, on_record=False)

    def _add(self, group: str, place: int, prompt: str, *, on_record: bool) -> str:
        fault = self.fault or self._place_fault(group, place)
        if not fault:
            found = ((index, rows.find(prompt)) for index, rows in enumerate(self._sources))
            source, row = next(((index, row) for index, row in found if row is not None), (-1, -1))
            if source < 0:
                fault = f"{group} has the prompt {prompt}, which no source of data.train has"
            else:
                fault = self._share_fault(source, place)
                fault = fault or self._row_fault(source, row, prompt, place, on_record=on_record)
            fault = fault and f"{fault}; {REMEDY}"
        self.fault = fault
        return fault

    def _place_fault(self, group: str, place: int) -> str:
        expected, self._next = self._next, self._next + 1
        if place == expected and group == f"g{place}":
            return ""
        lost = (
            f"places {expected} to {place - 1} are skipped" if place > expected else f"place {place} comes again"
        )
        lost = f"the group is not g{place}" if place == expected else lost
        return f"{group} has place {place} of the stream after {expected} groups: {lost}; {REMEDY}"

    def _share_fault(self, source: int, place: int) -> str:
        """Count a draw of a source; more than its share of a block is a fault."""
        if place % self._block == 0:
            self._in_block = [0] * len(self._slots)
        self._in_block[source] += 1
        if self._in_block[source] <= self._slots[source]:
            return ""
        return (
            f"data.train.{source} has more than its {self._slots[source]} of {self._block} draws at place {place},"
            " so another source has fewer"
        )

    def _row_fault(self, source: int, row: int, prompt: str, place: int, *, on_record: bool) -> str:
        """Add a draw of a row to its source's epoch."""
        epoch, rows, own = self._epochs[source], self._sources[source], self._drawn[source]
        self._drawn[source] += 1
        if self._order is PromptOrder.CURRICULUM and on_record:
            return ""
        num_open, by_signal = self._num_open(source), self._order is PromptOrder.SIGNAL
        if not by_signal and (own % num_open == 0 or num_open != self._open[source]):
            epoch.clear()
        self._open[source] = num_open
        is_new = epoch.add(row)
        if self._order is PromptOrder.SHUFFLED and not on_record and (fault := self._sizes[source].add(row)):
            return f"data.train.{source}: {fault}"
        if epoch.num_drawn == num_open or (own + 1 != len(rows) if by_signal else is_new):
            return ""
        missing = epoch.missing if num_open == len(rows) else None
        named = "" if missing is None else f" (e.g. {rows.id(missing)})"
        unseen = f"{num_open - epoch.num_drawn} of {num_open} prompts of data.train.{source}{named}"
        draw = (
            f"place {place} ends the first epoch"
            if by_signal
            else f"place {place} draws the prompt {prompt} again"
        )
        return f"{draw}, before {unseen} were drawn"
