"""The endless stream of problems that the controller draws groups from: sources by weight, problems in an order.

A place in the stream is one integer. The problem at a place follows from the files, the seed, and the group
rewards recorded before, in any order. So a resumed run, which records all rewards of its ledger
first, draws the same problems as a run without a stop (`tests/data/test_stream.py`).
"""

import re
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappush, heappushpop
from typing import Protocol

import msgspec
import numpy as np

from laminar_py.config.data import DataConfig, PromptOrder
from laminar_py.config.section import ConfigError
from laminar_py.data.problems import ProblemSet
from laminar_py.records.codec import IntArray
from laminar_py.records.metrics import OrderFigures
from laminar_py.records.scoring import GroupRewards
from laminar_py.records.trajectory import Prompt

SLOTS = 1000  # places of a block, which sources divide by weight
CACHED = 8  # blocks or epochs; a place of an older one costs a permutation


class WeightedSources:
    """Divides the places of a stream among sources by weight, e.g. 3 to 1: 750 and 250 of each 1000 places.

    Each source counts its own places: 0, 1, 2, ...
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        total = sum(weights)
        self._slots = [max(1, round(SLOTS * weight / total)) for weight in weights]
        self._seed = seed
        self._block = lru_cache(maxsize=CACHED)(self._shuffled)

    def at(self, place: int) -> tuple[int, int]:
        """Return (source, place within the source) for a place of the stream."""
        if len(self._slots) == 1:
            return 0, place
        number, offset = divmod(place, sum(self._slots))
        sources, ranks = self._block(number)
        source = int(sources[offset])
        return source, number * self._slots[source] + int(ranks[offset])

    def _shuffled(self, number: int) -> tuple[IntArray, IntArray]:
        """Return, for each slot in block `number`, its source and its rank among the source's slots."""
        sources = np.repeat(np.arange(len(self._slots), dtype=np.int32), self._slots)
        np.random.default_rng((self._seed, number, len(self._slots))).shuffle(sources)
        ranks = np.zeros_like(sources)
        for source, slots in enumerate(self._slots):
            ranks[sources == source] = np.arange(slots, dtype=np.int32)
        return sources, ranks


class Epochs:
    """Rows of a source without end: each epoch is a permutation of its own.

    With 3 rows, places 0 to 2 hold every row once, and so do places 3 to 5, in another order. A place costs O(1)
    while its epoch is cached.
    """

    def __init__(self, num_rows: int, *, seed: int, source: int) -> None:
        assert num_rows, "a stream needs a prompt"
        self.num_rows = num_rows
        self._key = (seed, source) if source else (seed,)
        self.order = lru_cache(maxsize=CACHED)(self._permute)  # [num_rows] rows of an epoch

    def row(self, place: int) -> int:
        """Return the row at a place >= 0."""
        epoch, offset = divmod(place, self.num_rows)
        return int(self.order(epoch)[offset])

    def _permute(self, epoch: int) -> IntArray:
        """Return the [num_rows] rows in the order of an epoch."""
        rows = np.arange(self.num_rows, dtype=np.int32)
        np.random.default_rng((*self._key, epoch)).shuffle(rows)
        return rows


Level = float | str
NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of a source, e.g. names `[1, 3]` with ranks `[0, 1, 0]` of three problems."""

    names: list[Level]  # from the lowest to the highest
    ranks: IntArray  # [n] level of each problem, as a place in `names`
    num_rows: list[int]  # [levels + 1] number of problems in the lowest 0, 1, 2, ... levels


def read_levels(problems: ProblemSet, field: str) -> Levels:
    """Read problems' levels from their field `field`. Raises `ConfigError` unless all are numbers or all texts."""
    ranks_found: dict[Level, int] = {}  # in the order of their first problems
    of_rows = array("i")
    for place in range(len(problems)):
        level = problems.field(place, field)
        if not isinstance(level, int | float | str) or isinstance(level, bool):
            raise _level_error(problems, place, field, "no number or text")
        if isinstance(level, str) is not isinstance(next(iter(ranks_found), level), str):
            raise _level_error(problems, place, field, "another type of value than the problems before")
        of_rows.append(ranks_found.setdefault(level, len(ranks_found)))
    names = sort_levels(list(ranks_found))
    rank_of = np.zeros(len(names), dtype=np.int32)
    rank_of[[ranks_found[name] for name in names]] = np.arange(len(names), dtype=np.int32)
    ranks: IntArray = rank_of[np.array(of_rows, dtype=np.int32)]
    return Levels(names, ranks, [0, *np.cumsum(np.bincount(ranks)).tolist()])


def sort_levels(levels: list[Level]) -> list[Level]:
    """Sort levels from the lowest to the highest: as numbers if all are ("8" before "10"), else as texts."""
    if all(not isinstance(level, str) or NUMBER.fullmatch(level) for level in levels):
        return sorted(levels, key=float)
    return sorted(levels, key=str)


def _level_error(problems: ProblemSet, place: int, field: str, fault: str) -> ConfigError:
    """Return the error for the problem at a place, whose level, in `field`, is `fault`."""
    return problems.error(
        place,
        f"{field!r} holds {fault}, and data.order=curriculum needs a level,",
        remedy="write a level, name its field in data.level, or choose another order",
    )


class ProblemOrder(Protocol):
    """Rule that chooses the row at each place of a source."""

    def row(self, source: int, own_place: int, *, place: int) -> int:
        """Return the row for place `own_place` of a source, which is `place` of the whole stream."""
        ...

    def num_open(self, source: int) -> int:
        """Return how many rows of a source may be drawn now: each comes once in an epoch of so many places."""
        ...

    def record_group(self, group: GroupRewards) -> None:
        """Record the rewards of a group when it closes."""
        ...

    @property
    def figures(self) -> OrderFigures:
        """Figures for `metrics.jsonl`."""
        ...


class Shuffled:
    """Order in which every row comes once in each epoch."""

    def __init__(self, epochs: Sequence[Epochs]) -> None:
        self._epochs = epochs
        self.figures = OrderFigures()

    def row(self, source: int, own_place: int, *, place: int) -> int:
        """Return the row of the epoch's permutation."""
        return self._epochs[source].row(own_place)

    def num_open(self, source: int) -> int:
        """Return the number of all rows."""
        return self._epochs[source].num_rows

    def record_group(self, group: GroupRewards) -> None:
        """Do nothing: the order does not depend on rewards."""


class LevelLog:
    """Solved shares of one level's last groups: those with the highest places, in whatever order they close."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._newest: list[tuple[int, float]] = []  # heap of (place, solved share)

    def add(self, place: int, solved: float) -> None:
        """Add the solved share of the group at a place."""
        push = heappush if len(self._newest) < self._groups else heappushpop
        push(self._newest, (place, solved))

    @property
    def full(self) -> bool:
        """True once it holds enough groups to judge the level."""
        return len(self._newest) == self._groups

    @property
    def solved(self) -> float | None:
        """Mean solved share; None without groups."""
        return sum(solved for _, solved in self._newest) / len(self._newest) if self._newest else None


class Curriculum:
    """Order that draws from open levels. A level of a source is open if all of its lower levels are solved."""

    def __init__(self, epochs: Sequence[Epochs], problems: Sequence[ProblemSet], *, settings: DataConfig) -> None:
        self._epochs = epochs
        self._problems = problems
        self._levels = [read_levels(problem_set, settings.level) for problem_set in problems]
        self._settings = settings
        self._logs = [{name: LevelLog(settings.level_groups) for name in levels.names} for levels in self._levels]
        self._order = lru_cache(maxsize=CACHED)(self._open_rows)

    def row(self, source: int, own_place: int, *, place: int) -> int:
        """Return the row of the epoch's permutation, restricted to rows of open levels."""
        epoch, offset = divmod(own_place, self.num_open(source))
        return int(self._order(source, len(self._open_levels(source)), epoch)[offset])

    def num_open(self, source: int) -> int:
        """Return the number of rows in the open levels."""
        return self._levels[source].num_rows[len(self._open_levels(source))]

    def _open_rows(self, source: int, num_open: int, epoch: int) -> IntArray:
        """Return an epoch's permutation of the rows in a source's lowest `num_open` levels."""
        order = self._epochs[source].order(epoch)
        rows: IntArray = order[self._levels[source].ranks[order] < num_open]
        return rows

    def _open_levels(self, source: int) -> list[Level]:
        """Return the open levels of a source: from the lowest to the first that is not solved."""
        levels: list[Level] = []
        for level, log in self._logs[source].items():
            levels.append(level)
            if not log.full or (log.solved or 0.0) < self._settings.opens_at:
                break
        return levels

    def record_group(self, group: GroupRewards) -> None:
        """Add a group's solved share to the log of its problem's level."""
        for problems, levels, logs in zip(self._problems, self._levels, self._logs, strict=True):
            place = problems.find(group.prompt_id)
            if place is not None:
                level = levels.names[levels.ranks[place]]
                logs[level].add(group.place, group.solved(self._settings.solved_at))

    @property
    def figures(self) -> OrderFigures:
        """Solved share of each level that has one, and the number of open levels."""
        solved = {
            f"{source}/{level}" if len(self._logs) > 1 else str(level): round(log.solved, 4)
            for source, logs in enumerate(self._logs)
            for level, log in logs.items()
            if log.solved is not None
        }
        num_open = sum(len(self._open_levels(source)) for source in range(len(self._logs)))
        return OrderFigures(solved=solved, open_levels=num_open)


class BySignal:
    """Order that keeps a drawn problem with probability max(floor, 2^-n) after n groups with equal rewards."""

    def __init__(
        self, epochs: Sequence[Epochs], problems: Sequence[ProblemSet], *, seed: int, floor: float
    ) -> None:
        self._epochs = epochs
        self._problems = problems
        self._seed = seed
        self._floor = floor
        self._last_signal: dict[str, int] = {}  # problem -> last place with different rewards
        self._silent: defaultdict[str, list[int]] = defaultdict(list)  # problem -> later places with equal ones

    def row(self, source: int, own_place: int, *, place: int) -> int:
        """Return the row of the epoch's permutation; while the drawn problem rests, draw a random row instead."""
        problems = self._problems[source]
        draws = np.random.default_rng((self._seed, place, len(problems)))
        row = self._epochs[source].row(own_place)
        while draws.random() >= self._probability(problems.id(row)):
            row = int(draws.integers(len(problems)))
        return row

    def num_open(self, source: int) -> int:
        """Return the number of all rows, resting ones included."""
        return self._epochs[source].num_rows

    def _probability(self, id: str) -> float:
        return max(self._floor, 2.0 ** -len(self._silent.get(id, ())))

    def record_group(self, group: GroupRewards) -> None:
        """Record whether the rewards of a group differ."""
        id, place = group.prompt_id, group.place
        if group.differ:
            self._last_signal[id] = max(place, self._last_signal.get(id, -1))
            later = [silent for silent in self._silent.pop(id, ()) if silent > self._last_signal[id]]
            if later:
                self._silent[id] = later
        elif place > self._last_signal.get(id, -1):
            self._silent[id].append(place)

    @property
    def figures(self) -> OrderFigures:
        """Number of resting problems: their newest groups had equal rewards."""
        return OrderFigures(resting=len(self._silent))


class PromptStream:
    """Problems without end: `prompt(place)` for any place >= 0."""

    def __init__(self, problems: Sequence[ProblemSet], settings: DataConfig, *, seed: int) -> None:
        self.problems = problems
        self._sources = WeightedSources([source.weight for source in settings.train], seed=seed)
        self._order = make_order(problems, settings, seed=seed)
        self.num_open = self._order.num_open
        self.learns = settings.order is not PromptOrder.SHUFFLED  # whether recorded groups change the order

    def prompt(self, place: int) -> Prompt:
        """Return the problem at a place >= 0. Its id names its row, so the id repeats in each epoch."""
        source, own_place = self._sources.at(place)
        row = self._order.row(source, own_place, place=place)
        prompt: Prompt = msgspec.structs.replace(self.problems[source][row], index=place)
        return prompt

    def find(self, id: str) -> Prompt | None:
        """Return the problem with an id, its row as `index`; None if no problem has the id."""
        matches = ((problems, problems.find(id)) for problems in self.problems)
        return next((problems[place] for problems, place in matches if place is not None), None)

    def record_group(self, group: GroupRewards) -> None:
        """Record the rewards of a group when it closes."""
        self._order.record_group(group)

    @property
    def figures(self) -> OrderFigures:
        """Figures of the order for `metrics.jsonl`."""
        return self._order.figures


def make_order(problems: Sequence[ProblemSet], settings: DataConfig, *, seed: int) -> ProblemOrder:
    """Make the order that `data.order` names. Under `curriculum`, raises `ConfigError` for a missing level."""
    epochs = [Epochs(len(problem_set), seed=seed, source=index) for index, problem_set in enumerate(problems)]
    if settings.order is PromptOrder.SIGNAL:
        return BySignal(epochs, problems, seed=seed, floor=settings.rest_floor)
    if settings.order is PromptOrder.CURRICULUM:
        return Curriculum(epochs, problems, settings=settings)
    return Shuffled(epochs)
