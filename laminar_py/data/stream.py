"""The endless stream of problems that the dispatcher draws groups from: by weight of sources, in an order.

Owned by the controller, which tells it what each group gave. A place in the stream is one integer; the problem at
it follows from the files, the seed, and what was told by then, in whatever order that was. So a resumed run, which
tells it all that is on record, goes on as one that was never stopped.
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

SLOTS = 1000  # places that are divided by weight
CACHED = 8  # blocks or epochs; a lost prompt of an older one costs a permutation


class WeightedSources:
    """Places of a stream divided among sources by weight, e.g. 3 to 1: of each 1000 places 750 and 250.

    Each source has places of its own, 0, 1, 2, ..., in order.
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        total = sum(weights)
        self._slots = [max(1, round(SLOTS * weight / total)) for weight in weights]
        self._seed = seed
        self._block = lru_cache(maxsize=CACHED)(self._shuffled)

    def at(self, place: int) -> tuple[int, int]:
        """The source of a place, and its own place there."""
        if len(self._slots) == 1:
            return 0, place
        number, offset = divmod(place, sum(self._slots))
        sources, ranks = self._block(number)
        source = int(sources[offset])
        return source, number * self._slots[source] + int(ranks[offset])

    def _shuffled(self, number: int) -> tuple[IntArray, IntArray]:
        sources = np.repeat(np.arange(len(self._slots), dtype=np.int32), self._slots)
        np.random.default_rng((self._seed, number, len(self._slots))).shuffle(sources)
        ranks = np.zeros_like(sources)
        for source, slots in enumerate(self._slots):
            ranks[sources == source] = np.arange(slots, dtype=np.int32)
        return sources, ranks


class Epochs:
    """Rows of a source without end: epoch after epoch, each a permutation of its own.

    With 3 rows, places 0 to 2 hold every row once, and so do 3 to 5 in another order. Places may be asked for in
    any order; each costs O(1) once its epoch has been seen.
    """

    def __init__(self, num_rows: int, *, seed: int, source: int) -> None:
        assert num_rows, "a stream needs a prompt"
        self.num_rows = num_rows
        self._key = (seed, source) if source else (seed,)
        self.order = lru_cache(maxsize=CACHED)(self._permute)  # [num_rows] rows of an epoch

    def row(self, place: int) -> int:
        """The row at a place >= 0."""
        epoch, offset = divmod(place, self.num_rows)
        return int(self.order(epoch)[offset])

    def _permute(self, epoch: int) -> IntArray:
        rows = np.arange(self.num_rows, dtype=np.int32)
        np.random.default_rng((*self._key, epoch)).shuffle(rows)
        return rows


Level = float | str
NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of a source, e.g. names `[1, 3]` with ranks `[0, 1, 0]` of three problems."""

    names: list[Level]  # in order
    ranks: IntArray  # [n] level of each problem, as a place in `names`
    num_rows: list[int]  # problems of the lowest 0, 1, 2, ... levels


def read_levels(problems: ProblemSet, field: str) -> Levels:
    """Levels in the field of that name: all numbers, or all text. Raises `ConfigError`.

    Texts are sorted as such unless all of them are numbers.
    """
    found: dict[Level, int] = {}  # in the order of their first problems
    of_rows = array("i")
    for place in range(len(problems)):
        level = problems.field(place, field)
        if not isinstance(level, int | float | str) or isinstance(level, bool):
            raise _no_level(problems, place, field, "no number or text")
        if isinstance(level, str) is not isinstance(next(iter(found), level), str):
            raise _no_level(problems, place, field, "neither a number nor a text as those before")
        of_rows.append(found.setdefault(level, len(found)))
    names = sort_levels(list(found))
    rank_of = np.zeros(len(names), dtype=np.int32)
    rank_of[[found[name] for name in names]] = np.arange(len(names), dtype=np.int32)
    ranks: IntArray = rank_of[np.array(of_rows, dtype=np.int32)]
    return Levels(names, ranks, [0, *np.cumsum(np.bincount(ranks)).tolist()])


def sort_levels(levels: list[Level]) -> list[Level]:
    """Levels from the lowest to the highest: "8" before "10", where all texts are numbers."""
    if all(not isinstance(level, str) or NUMBER.fullmatch(level) for level in levels):
        return sorted(levels, key=float)
    return sorted(levels, key=str)


def _no_level(problems: ProblemSet, place: int, field: str, fault: str) -> ConfigError:
    return problems.error(
        place,
        f"{field!r} holds {fault}, and data.order=curriculum needs a level,",
        remedy="write one, name its field in data.level, or choose another order",
    )


class ProblemOrder(Protocol):
    """Rule by which rows of a source come at its places."""

    def row(self, source: int, own_place: int, *, place: int) -> int:
        """The row at a source's own place, which is `place` of the whole stream."""
        ...

    def tell(self, group: GroupRewards) -> None:
        """Take in what a group gave."""
        ...

    @property
    def figures(self) -> OrderFigures:
        """Figures for the log."""
        ...


class Shuffled:
    """Every row once in each epoch."""

    def __init__(self, epochs: Sequence[Epochs]) -> None:
        self._epochs = epochs
        self.figures = OrderFigures()

    def row(self, source: int, own_place: int, *, place: int) -> int:
        """The row of the epoch's permutation."""
        return self._epochs[source].row(own_place)

    def tell(self, group: GroupRewards) -> None:
        """Nothing depends on it."""


class LevelLog:
    """The last groups of a level, by their places, whenever they were told."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._newest: list[tuple[int, float]] = []  # heap of (place, solved share)

    def add(self, place: int, solved: float) -> None:
        """Take in a group."""
        push = heappush if len(self._newest) < self._groups else heappushpop
        push(self._newest, (place, solved))

    @property
    def full(self) -> bool:
        """True once there were enough groups to judge by."""
        return len(self._newest) == self._groups

    @property
    def solved(self) -> float | None:
        """Mean of their solved shares."""
        return sum(solved for _, solved in self._newest) / len(self._newest) if self._newest else None


class Curriculum:
    """Levels of each source, the lowest first; one is open while each one below is solved."""

    def __init__(self, epochs: Sequence[Epochs], problems: Sequence[ProblemSet], *, settings: DataConfig) -> None:
        self._epochs = epochs
        self._problems = problems
        self._levels = [read_levels(one, settings.level) for one in problems]
        self._settings = settings
        self._logs = [{name: LevelLog(settings.level_groups) for name in of.names} for of in self._levels]
        self._order = lru_cache(maxsize=CACHED)(self._open_rows)

    def row(self, source: int, own_place: int, *, place: int) -> int:
        """The row of a permutation of those whose level is open."""
        num_open = len(self._open(source))
        epoch, offset = divmod(own_place, self._levels[source].num_rows[num_open])
        return int(self._order(source, num_open, epoch)[offset])

    def _open_rows(self, source: int, num_open: int, epoch: int) -> IntArray:
        order = self._epochs[source].order(epoch)
        rows: IntArray = order[self._levels[source].ranks[order] < num_open]
        return rows

    def _open(self, source: int) -> list[Level]:
        open: list[Level] = []
        for level, log in self._logs[source].items():
            open.append(level)
            if not log.full or (log.solved or 0.0) < self._settings.opens_at:
                break
        return open

    def tell(self, group: GroupRewards) -> None:
        """Note a group in its level's log."""
        for problems, levels, logs in zip(self._problems, self._levels, self._logs, strict=True):
            place = problems.find(group.prompt_id)
            if place is not None:
                level = levels.names[levels.ranks[place]]
                logs[level].add(group.place, group.solved(self._settings.solved_at))

    @property
    def figures(self) -> OrderFigures:
        """Solved shares of levels that had groups, and how many levels are open."""
        solved = {
            f"{source}/{level}" if len(self._logs) > 1 else str(level): round(log.solved, 4)
            for source, of in enumerate(self._logs)
            for level, log in of.items()
            if log.solved is not None
        }
        return OrderFigures(solved=solved, open_levels=sum(len(self._open(s)) for s in range(len(self._logs))))


class BySignal:
    """Problems whose last n groups had equal rewards come with probability max(floor, 2^-n)."""

    def __init__(
        self, epochs: Sequence[Epochs], problems: Sequence[ProblemSet], *, seed: int, floor: float
    ) -> None:
        self._epochs = epochs
        self._problems = problems
        self._seed = seed
        self._floor = floor
        self._taught: dict[str, int] = {}  # last place with a signal
        self._silent: defaultdict[str, list[int]] = defaultdict(list)  # places since, without one

    def row(self, source: int, own_place: int, *, place: int) -> int:
        """The row of the epoch's permutation, or, where it rests, another one of the source."""
        problems = self._problems[source]
        draws = np.random.default_rng((self._seed, place, len(problems)))
        row = self._epochs[source].row(own_place)
        while draws.random() >= self._probability(problems.id(row)):
            row = int(draws.integers(len(problems)))
        return row

    def _probability(self, id: str) -> float:
        return max(self._floor, 2.0 ** -len(self._silent[id])) if id in self._silent else 1.0

    def tell(self, group: GroupRewards) -> None:
        """Note whether a group taught something."""
        id, place = group.prompt_id, group.place
        if group.differ:
            self._taught[id] = max(place, self._taught.get(id, -1))
            later = [silent for silent in self._silent.pop(id, ()) if silent > self._taught[id]]
            if later:
                self._silent[id] = later
        elif place > self._taught.get(id, -1):
            self._silent[id].append(place)

    @property
    def figures(self) -> OrderFigures:
        """Number of problems that come rarely."""
        return OrderFigures(resting=len(self._silent))


class PromptStream:
    """Problems without end."""

    def __init__(self, problems: Sequence[ProblemSet], settings: DataConfig, *, seed: int) -> None:
        self._problems = problems
        self._sources = WeightedSources([source.weight for source in settings.train], seed=seed)
        self._order = make_order(problems, settings, seed=seed)
        self.learns = settings.order is not PromptOrder.SHUFFLED  # from what it is told

    def prompt(self, place: int) -> Prompt:
        """The problem at a place >= 0; its id is its row's, however often it comes."""
        source, own_place = self._sources.at(place)
        row = self._order.row(source, own_place, place=place)
        prompt: Prompt = msgspec.structs.replace(self._problems[source][row], index=place)
        return prompt

    def find(self, id: str) -> Prompt | None:
        """The problem that has an id, with its row for its index; None where none has."""
        found = ((problems, problems.find(id)) for problems in self._problems)
        return next((problems[place] for problems, place in found if place is not None), None)

    def tell(self, group: GroupRewards) -> None:
        """Take in what the group of a prompt gave."""
        self._order.tell(group)

    @property
    def figures(self) -> OrderFigures:
        """Figures of the order, for the log."""
        return self._order.figures


def make_order(problems: Sequence[ProblemSet], settings: DataConfig, *, seed: int) -> ProblemOrder:
    """The order that `data.order` names. Raises `ConfigError` on a problem without a level that needs one."""
    epochs = [Epochs(len(one), seed=seed, source=index) for index, one in enumerate(problems)]
    if settings.order is PromptOrder.SIGNAL:
        return BySignal(epochs, problems, seed=seed, floor=settings.rest_floor)
    if settings.order is PromptOrder.CURRICULUM:
        return Curriculum(epochs, problems, settings=settings)
    return Shuffled(epochs)
