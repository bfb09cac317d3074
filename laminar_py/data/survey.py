"""Figures of the problems of a source: lengths, fields, tasks, duplicates. Pure; for `laminar data`."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from laminar_py.data.chat import PromptEncoder
from laminar_py.data.demonstrations import Demonstrations, read_texts
from laminar_py.data.problems import ProblemSet
from laminar_py.data.sources import DataSource
from laminar_py.data.stream import sort_levels
from laminar_py.data.tokenizer import Tokenizer
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
        problem = problems.without_prompt(place)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownWords:
    """Unknown words of a source, e.g. 12 in 900 of its 90,000 rows, the first "zebra" in data.train=t.jsonl:3."""

    number: int
    first: str
    place: str  # of the first
    num_seen: int  # rows that were looked at
    num_rows: int

    @property
    def rows(self) -> str:
        """Words on what was looked at, e.g. "900 of its 90,000 rows" or "all its rows"."""
        return (
            f"{self.num_seen:,} of its {self.num_rows:,} rows" if self.num_seen < self.num_rows else "all its rows"
        )


def unknown_words(
    problems: Sequence[ProblemSet],
    demonstrations: Demonstrations | None,
    *,
    encoder: PromptEncoder,
    most: int | None = None,
) -> dict[str, UnknownWords]:
    """Unknown words of each source that has any, by its field of the config; prompts as the model gets them.

    `most` rows of a source are looked at, spread evenly over it; None: all.
    """
    if not encoder.tokenizer.has_unknown:
        return {}
    found: dict[str, UnknownWords | None] = {}
    for of in problems:
        every = _every(len(of), most)
        found[of.source.field] = _count(_prompts(of, every), encoder.tokenizer, num_rows=len(of))
    if demonstrations is not None:
        source, num_rows = demonstrations.source, len(demonstrations.all)
        texts = _demonstrations(source, encoder, _every(num_rows, most))
        found[source.field] = _count(texts, encoder.tokenizer, num_rows=num_rows)
    return {field: words for field, words in found.items() if words is not None}


def _every(number: int, most: int | None) -> int:
    """The smallest step at which no more than `most` of so many rows are looked at."""
    return 1 if most is None else max(-(-number // most), 1)


def _prompts(problems: ProblemSet, every: int) -> Iterable[tuple[str, Sequence[str]]]:
    """Place and text of every so many-th prompt."""
    places = range(0, len(problems), every)
    return ((problems.source.place(problems.row(at)), (problems.text(at),)) for at in places)


def _demonstrations(source: DataSource, encoder: PromptEncoder, every: int) -> Iterable[tuple[str, Sequence[str]]]:
    """Place and texts of every so many-th demonstration."""
    return ((source.place(row), texts) for row, *texts in read_texts(source, encoder=encoder, every=every))


def _count(
    rows: Iterable[tuple[str, Sequence[str]]], tokenizer: Tokenizer, *, num_rows: int
) -> UnknownWords | None:
    number, num_seen, first = 0, 0, None
    for place, texts in rows:
        num_seen += 1
        words = [word for text in texts for word in tokenizer.unknown_words(text)]
        number += len(words)
        if words and first is None:
            first = (words[0], place)
    if first is None:
        return None
    return UnknownWords(number=number, first=first[0], place=first[1], num_seen=num_seen, num_rows=num_rows)
