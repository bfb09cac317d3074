"""Search in a small corpus."""

import importlib.util
import json

import pytest

from laminar_contrib.tools.search import Passage, PassageSearch, read_corpus
from laminar_py.config.section import ConfigError

TEXTS = ["Paris is the capital of France.", "Rome is the capital of Italy.", "Bread is made of flour. " * 100]
needs_bm25s = pytest.mark.skipif(importlib.util.find_spec("bm25s") is None, reason="needs laminar-py[search]")


@pytest.fixture
def found():
    passages = [Passage(text, title=title) for text, title in zip(TEXTS, ("France", "Italy", ""), strict=True)]
    return PassageSearch(passages, most=2, chars=60).search


@needs_bm25s
def test_the_best_passages_come_first_and_are_bounded(found):
    paris, rome = "[1] France: Paris is the capital of France.", "[2] Italy: Rome is the capital of Italy."
    assert found("capital of FRANCE?") == f"{paris}\n{rome}"
    assert found("flour") == f"[1] {TEXTS[2][:60]}"


@needs_bm25s
@pytest.mark.parametrize("query", ["", "?!", "zebra", "\x00", "zebra " * 100_000])
def test_a_query_that_fits_nothing_finds_nothing(found, query):
    assert found(query) == "nothing found"


@needs_bm25s
def test_a_corpus_may_have_fewer_passages_than_are_asked_for():
    assert PassageSearch([Passage("one")], most=9, chars=99).search("one two") == "[1] one"


def test_a_corpus_is_lines_of_json_or_paragraphs(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x\\u2028y", "id": 1}\n\n{"text": "z", "title": "t"}\n')
    (tmp_path / "a.txt").write_text("one\ntwo\n \n\nthree\n")
    assert read_corpus(tmp_path / "a.jsonl") == [Passage("x\u2028y"), Passage("z", title="t")]
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}')
    assert read_corpus(tmp_path / "marked.jsonl") == [Passage("x")]  # behind a byte-order mark
    assert read_corpus(tmp_path / "a.txt") == [Passage("one\ntwo"), Passage("three")]


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("none.txt", None, "{path}: cannot be read ([Errno 2] No such file or directory"),
        ("bytes.txt", b"\xff", "{path}: cannot be read ('utf-8' codec"),
        ("empty.txt", b"\n ... \n", "{path}: has no passage with a word; name another file"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}', '{path}:2: no {{"text": "..."}} ('),
        ("b.jsonl", b"\n" + json.dumps(["x"]).encode(), '{path}:2: no {{"text": "..."}} ('),
    ],
)
def test_a_corpus_that_cannot_be_had_is_explained_in_one_line(tmp_path, name, content, fault):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_corpus(path)
    assert str(caught.value).startswith(f"tools.corpus={fault.format(path=path)}")
    assert "\n" not in str(caught.value)


def test_without_its_library_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tools.use=search: the package bm25s is not installed; pip install "):
        PassageSearch([Passage("one")], most=1, chars=99)
