"""Figures of the problems of a source: lengths, fields, tasks, duplicates. Pure; for `laminar data`."""

import math
from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np

from laminar_py.data.demonstrations import Demonstrations
from laminar_py.data.levels import sort_levels
from laminar_py.data.problems import ProblemSet
from laminar_py.records.codec import IntArray

MOST_LEVELS = 20  # values of a field that is a level


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFigures:
    """Figures of a source, e.g. of 800 problems with 31, 60 and 212 tokens (p50, p95, most)."""

    num_problems: int
    tokens: tuple[int, int, int]  # of prompts: p50, p95, the most
    num_too_long: int  # prompts that leave no room for a whole response, or demonstrations longer than a step
    first_too_long: str  # place of the first of these; "" without any
    num_duplicates: int  # problems whose prompt stands before
    tasks: dict[str, int]  # problems by task; "" where none is named
    fields: dict[str, int]  # problems that have the field, which goes to their reward
    levels: dict[str, int]  # problems by level, where the field is one


def source_figures(problems: ProblemSet, *, level: str, max_prompt_tokens: int | None) -> SourceFigures:
    """Figures of problems, of which there is one at least; `level` is the field with their levels."""
    counted = problems.lengths()
    lengths, long = np.sort(counted), _longer(counted, max_prompt_tokens)
    tasks: Counter[str] = Counter()
    fields: Counter[str] = Counter()
    levels: Counter[float | str] = Counter()
    for place in range(len(problems)):
        problem = problems.stated(place)
        given = msgspec.json.decode(problem.fields_json)
        tasks[problem.task] += 1
        fields.update(["answer", *given] if problem.answer else list(given))
        if isinstance(given.get(level), int | float | str):
            levels[given[level]] += 1
    few = len(levels) <= MOST_LEVELS
    return SourceFigures(
        num_problems=len(problems),
        tokens=(_quantile(lengths, 0.5), _quantile(lengths, 0.95), int(lengths[-1])),
        num_too_long=len(long),
        first_too_long=problems.source.place(problems.row(long[0])) if long else "",
        num_duplicates=problems.num_duplicates,
        tasks=dict(tasks.most_common()),
        fields=dict(fields.most_common()),
        levels={str(one): levels[one] for one in sort_levels(list(levels))} if few else {},
    )


def demonstration_figures(demonstrations: Demonstrations, *, max_tokens: int | None) -> SourceFigures:
    """Figures of demonstrations, of which there is one at least; their tokens are those of prompt and response."""
    rows = demonstrations.all
    counted = np.array([one.num_tokens for one in rows], dtype=np.int32)
    lengths, long = np.sort(counted), _longer(counted, max_tokens)
    return SourceFigures(
        num_problems=len(rows),
        tokens=(_quantile(lengths, 0.5), _quantile(lengths, 0.95), int(lengths[-1])),
        num_too_long=len(long),
        first_too_long=demonstrations.source.place(rows[long[0]].row) if long else "",
        num_duplicates=len(rows) - len({one.prompt_ids.tobytes() for one in rows}),
        tasks={},
        fields={},
        levels={},
    )


def _longer(lengths: IntArray, most: int | None) -> list[int]:
    """Places of those of [n] lengths that are above `most`; None: no bound."""
    return [] if most is None else np.flatnonzero(lengths > most).tolist()


def _quantile(ordered: IntArray, q: float) -> int:
    """The smallest of [n] sorted values with at least a share q at or below it."""
    return int(ordered[math.ceil(q * len(ordered)) - 1])
