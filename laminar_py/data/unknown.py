"""Words of prompts and demonstrations that the model's tokenizer does not have, and reads as one unknown token.

A model can neither tell them apart nor write them. Called by `preflight`, which looks at a sample so that a run
with a million problems does not wait for it, and by `laminar data`, which looks at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from laminar_py.data.chat import PromptEncoder
from laminar_py.data.demonstrations import Demonstrations, read_texts
from laminar_py.data.problems import ProblemSet
from laminar_py.data.sources import DataSource
from laminar_py.data.tokenizer import Tokenizer


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
        words = [word for text in texts for word in tokenizer.unknown(text)]
        number += len(words)
        if words and first is None:
            first = (words[0], place)
    if first is None:
        return None
    return UnknownWords(number=number, first=first[0], place=first[1], num_seen=num_seen, num_rows=num_rows)
