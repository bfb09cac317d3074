"""The tool `search`: passages of a local corpus by BM25 (Robertson and Zaragoza, 2009), with the library bm25s."""

import importlib.util
import re
from pathlib import Path

import msgspec

from laminar_py.config import ConfigError

WORD = re.compile(r"\w+")


class Passage(msgspec.Struct, frozen=True):
    """Line of a corpus, e.g. `Passage("Paris is the capital of France.", title="Paris")`."""

    text: str
    title: str = ""

    @property
    def whole(self) -> str:
        """Title and text."""
        return f"{self.title}: {self.text}" if self.title else self.text


def read_corpus(path: Path) -> list[Passage]:
    """Read passages of a `.jsonl` or text file. Raises `ConfigError` if no passage has a word."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"tools.corpus={path}: cannot be read ({line}); name a file of text in UTF-8") from error
    passages = _lines(path, text) if path.suffix == ".jsonl" else _paragraphs(text)
    if not any(WORD.search(passage.whole) for passage in passages):
        raise ConfigError(f"tools.corpus={path}: has no passage with a word; name another file")
    return passages


def _lines(path: Path, text: str) -> list[Passage]:
    """Read passages from JSON lines. Raises `ConfigError` with the line of a fault."""
    passages = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            passages.append(msgspec.json.decode(line, type=Passage))
        except msgspec.DecodeError as error:
            fault = f'no {{"text": "..."}} ({error}); mend the line'
            raise ConfigError(f"tools.corpus={path}:{number}: {fault}") from error
    return passages


def _paragraphs(text: str) -> list[Passage]:
    return [Passage(part.strip()) for part in re.split(r"\n\s*\n", text) if part.strip()]


class PassageSearch:
    """An index of passages in memory, which many trajectories may search at the same time."""

    def __init__(self, passages: list[Passage], *, most: int, chars: int) -> None:
        if importlib.util.find_spec("bm25s") is None:
            remedy = "pip install laminar-py[search], or leave it out"
            raise ConfigError(f"tools.use=search: the package bm25s is not installed; {remedy}")
        import bm25s

        self._passages = passages
        self._most = min(most, len(passages))
        self._chars = chars
        self._index = bm25s.BM25()
        self._index.index([_words(passage.whole) for passage in passages], show_progress=False)

    def search(self, query: str) -> str:
        """Return the passages of a text collection that match the words best, the best first."""
        places, scores = self._index.retrieve([_words(query)], k=self._most, show_progress=False)
        best = [self._passages[place] for place, score in zip(places[0], scores[0], strict=True) if score > 0]
        texts = [f"[{number}] {passage.whole[: self._chars]}" for number, passage in enumerate(best, 1)]
        return "\n".join(texts) or "nothing found"


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())
