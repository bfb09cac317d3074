"""Levels of the problems of a source, by which a curriculum opens them. Called by `stream` and `laminar data`."""

import re
from array import array
from dataclasses import dataclass

import numpy as np

from laminar_py.config.section import ConfigError
from laminar_py.data.problems import ProblemSet
from laminar_py.records.codec import IntArray

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
