"""Figures of a source's problems for `laminar data`: lengths, fields, tasks, duplicates, unknown words.
Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from laminar_py.data.chat import PromptEncoder
from laminar_py.data.demonstrations import Demonstrations, read_texts
from laminar_py.data.problems import ProblemSet
from laminar_py.data.stream import sort_levels
from laminar_py.data.tokenizer import Tokenizer
from laminar_py.records.codec import IntArray

MOST_LEVELS = 20  # distinct values; a field with more is no level


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFigures:
    """Figures of a source, e.g. `SourceFigures(num_problems=800, tokens=(31, 60, 212), num_too_long=0, ...)`."""

    num_problems: int
    tokens: tuple[int, int, int]  # p50, p95 and maximum of prompts, or of whole demonstrations
    num_too_long: int  # prompts that leave no room for a whole response, or demonstrations longer than a step
    first_too_long: str  # place of the first such row; "" without any
    num_duplicates: int  # problems whose prompt stands before
    tasks: dict[str, int] = field(default_factory=dict)  # task -> problems; "" for problems without a task
    fields: dict[str, int] = field(default_factory=dict)  # field for the reward -> problems that have it
    levels: dict[str, int] = field(default_factory=dict)  # level -> problems, where the field has few values


def source_figures(problems: ProblemSet, *, level: str, max_prompt_tokens: int | None) -> SourceFigures:
    """Figures of one or more problems; `level` is the name of the field with their levels."""
    counted = problems.lengths()
    long = _places_above(counted, max_prompt_tokens)
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
        tokens=_quantiles(counted),
        num_too_long=len(long),
        first_too_long=problems.source.place(problems.row(long[0])) if long else "",
        num_duplicates=problems.num_duplicates,
        tasks=dict(tasks.most_common()),
        fields=dict(fields.most_common()),
        levels={str(one): levels[one] for one in sort_levels(list(levels))} if few else {},
    )


def demonstration_figures(demonstrations: Demonstrations, *, max_tokens: int | None) -> SourceFigures:
    """Figures of one or more demonstrations; tokens are of prompt and response together."""
    rows = demonstrations.all
    counted = np.array([one.num_tokens for one in rows], dtype=np.int32)
    long = _places_above(counted, max_tokens)
    return SourceFigures(
        num_problems=len(rows),
        tokens=_quantiles(counted),
        num_too_long=len(long),
        first_too_long=demonstrations.source.place(rows[long[0]].row) if long else "",
        num_duplicates=len(rows) - len({one.prompt_ids.tobytes() for one in rows}),
    )


def _places_above(lengths: IntArray, most: int | None) -> list[int]:
    """Places in [n] lengths that are above `most`; None: no bound."""
    return [] if most is None else np.flatnonzero(lengths > most).tolist()


def _quantiles(lengths: IntArray) -> tuple[int, int, int]:
    """p50, p95 and maximum of [n] lengths; a quantile is the smallest value with that share at or below it."""
    ordered = np.sort(lengths)
    p50, p95 = (int(ordered[math.ceil(q * len(ordered)) - 1]) for q in (0.5, 0.95))
    return p50, p95, int(ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownWords:
    """Words of a source that its tokenizer lacks, e.g. 12 words in 900 of 90,000 rows:

    `UnknownWords(number=12, first="zebra", place="data.train=t.jsonl:3", num_seen=900, num_rows=90_000)`.
    """

    number: int
    first: str
    place: str  # of the first
    num_seen: int  # rows that were searched
    num_rows: int

    @property
    def rows(self) -> str:
        """Text for the searched rows, e.g. "900 of its 90,000 rows" or "all its rows"."""
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
    """Unknown words in written prompts and responses, by the config's field of each source that has any.

    At most `most` rows of a source are searched, spread evenly; None: all.
    """
    if not encoder.tokenizer.has_unknown:
        return {}
    found: dict[str, UnknownWords | None] = {}
    for problem_set in problems:
        places = range(0, len(problem_set), _step(len(problem_set), most))
        rows = ((problem_set.source.place(problem_set.row(at)), (problem_set.text(at),)) for at in places)
        found[problem_set.source.field] = _find_unknown(rows, encoder.tokenizer, num_rows=len(problem_set))
    if demonstrations is not None:
        source, num_rows = demonstrations.source, len(demonstrations.all)
        texts = read_texts(source, encoder=encoder, every=_step(num_rows, most))
        pairs = ((source.place(row), (prompt, response)) for row, prompt, response in texts)
        found[source.field] = _find_unknown(pairs, encoder.tokenizer, num_rows=num_rows)
    return {field: words for field, words in found.items() if words is not None}


def _step(number: int, most: int | None) -> int:
    """Smallest step that takes at most `most` of `number` rows; 1 for None."""
    return 1 if most is None else max(-(-number // most), 1)


def _find_unknown(
    rows: Iterable[tuple[str, Sequence[str]]], tokenizer: Tokenizer, *, num_rows: int
) -> UnknownWords | None:
    """Unknown words in the texts of rows, each given with its place; None where there are none."""
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
