"""Figures of problems for `laminar data` and `laminar doctor`: lengths, fields, tasks, duplicates, leaks, unknown
words."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from laminar_py.config import ConfigError, RunConfig
from laminar_py.data import (
    Demonstrations,
    ProblemSet,
    PromptEncoder,
    Tokenizer,
    find_leaks,
    load_tokenizer,
    sort_levels,
)
from laminar_py.records.codec import IntArray
from laminar_py.runtime.preflight import Problems, read_problems

MOST_BYTES = 4 << 20  # of a file that `laminar doctor` reads
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


def leaks(problems: Problems) -> Iterator[str]:
    """Yield a line on each evaluation set with prompts of the training data."""
    for heldout in problems.sets.values():
        found = find_leaks(heldout, problems.train)
        for place, there in found[:1]:
            first = f"{heldout.source.place(heldout.row(place))} is {there}"
            yield f"{heldout.source.field}: {len(found)} prompts are trained on, e.g. {first}"


def leaks_of(config: RunConfig) -> list[str]:
    """Return `leaks` of a run whose files are here and small; none where they are large, or cannot be read."""
    sources = [Path(source.path) for source in (*config.data.train, *config.eval.sets.values())]
    files = [path for path in sources if path.is_file() and path.stat().st_size <= MOST_BYTES]
    if len(files) < len(sources) or not config.eval.sets or config.data.prepare is not None:
        return []
    try:
        tokenizer = load_tokenizer(config.model.path)
        encoder = PromptEncoder(tokenizer, config.model.path, config.data.chat, config.environment)
        return list(leaks(read_problems(config, encoder, limited=False)))
    except ConfigError:  # `laminar data` names it
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownWords:
    """Words that a tokenizer lacks, e.g. `UnknownWords(number=12, first="zebra", place="data.train=t:3")`."""

    number: int
    first: str
    place: str  # of the first


def unknown_words(
    problems: Sequence[ProblemSet],
    demonstrations: Demonstrations | None,
    *,
    encoder: PromptEncoder,
) -> dict[str, UnknownWords]:
    """Unknown words in written prompts and responses, by the config's field of each source that has any."""
    if not encoder.tokenizer.has_unknown:
        return {}
    found: dict[str, UnknownWords | None] = {}
    for problem_set in problems:
        places = range(len(problem_set))
        rows = ((problem_set.source.place(problem_set.row(at)), (problem_set.text(at),)) for at in places)
        found[problem_set.source.field] = _find_unknown(rows, encoder.tokenizer)
    if demonstrations is not None:
        source = demonstrations.source
        pairs = ((source.place(one.row), (one.prompt, one.response)) for one in demonstrations.all)
        found[source.field] = _find_unknown(pairs, encoder.tokenizer)
    return {field: words for field, words in found.items() if words is not None}


def _find_unknown(rows: Iterable[tuple[str, Sequence[str]]], tokenizer: Tokenizer) -> UnknownWords | None:
    """Unknown words in the texts of rows, each given with its place; None where there are none."""
    number, first = 0, None
    for place, texts in rows:
        words = [word for text in texts for word in tokenizer.unknown_words(text)]
        number += len(words)
        if words and first is None:
            first = (words[0], place)
    if first is None:
        return None
    return UnknownWords(number=number, first=first[0], place=first[1])
