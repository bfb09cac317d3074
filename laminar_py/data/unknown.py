"""Words of prompts and demonstrations that the model's tokenizer does not have, and reads as one unknown token.

A model can neither tell them apart nor write them. Called by `preflight` and `laminar data`.
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
    """Unknown words of a source, e.g. 12, of which the first is "zebra" in data.train=train.jsonl:3."""

    number: int
    first: str
    place: str  # of the first


def unknown_words(
    problems: Sequence[ProblemSet], demonstrations: Demonstrations | None, *, encoder: PromptEncoder
) -> dict[str, UnknownWords]:
    """Unknown words of each source that has any, by its field of the config; prompts as the model gets them."""
    if not encoder.tokenizer.has_unknown:
        return {}
    texts = {of.source.field: _prompts(of) for of in problems}
    if demonstrations is not None:
        texts[demonstrations.source.field] = _demonstrations(demonstrations.source, encoder)
    found = {field: _count(given, encoder.tokenizer) for field, given in texts.items()}
    return {field: words for field, words in found.items() if words is not None}


def _prompts(problems: ProblemSet) -> Iterable[tuple[str, str]]:
    """Place and text of each prompt."""
    return ((problems.source.place(problems.row(at)), problems.text(at)) for at in range(len(problems)))


def _demonstrations(source: DataSource, encoder: PromptEncoder) -> Iterable[tuple[str, str]]:
    """Place and texts of each demonstration."""
    return ((source.place(row), text) for row, *texts in read_texts(source, encoder=encoder) for text in texts)


def _count(texts: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> UnknownWords | None:
    number, first = 0, None
    for place, text in texts:
        words = tokenizer.unknown(text)
        number += len(words)
        if words and first is None:
            first = (words[0], place)
    return None if first is None else UnknownWords(number=number, first=first[0], place=first[1])
