"""Limits on how the code is built; `python -m tests.house --places` says where one is broken."""

from pathlib import Path

import pytest

from tests.house import Checkout, banned, banned_in_messages, count, places

ROOT = Path(__file__).parent.parent


LIMITS = {
    "calls with eight or more positional arguments": 0,
    "records of more than four fields that are not keyword-only": 0,
    "examples that give keyword-only fields by their place": 0,
    "calls of setattr": 0,
    "files above 600 lines": 0,
    "functions above 50 lines": 0,
    "constructors above 40 lines": 0,
    "import cycles between rooms": 0,
    "docstrings that state an invariant without its test or law": 0,
}
MOST_BANNED = 1  # words of docstrings and comments that docs/style.md replaces; may only fall
MOST_BANNED_MESSAGES = 9  # words of raised messages; may only fall


@pytest.fixture(scope="module")
def code():
    return Checkout(ROOT)


def test_no_more_of_these_than_the_house_allows(code):
    found = places(code)
    assert {row: found[row] for row, limit in LIMITS.items() if len(found[row]) > limit} == {}


def test_no_more_banned_words_than_there_were(code):
    assert len(found := banned(code)) <= MOST_BANNED, "\n".join(found)


def test_no_more_banned_words_in_messages_than_there_were(code):
    assert len(found := banned_in_messages(code)) <= MOST_BANNED_MESSAGES, "\n".join(found)


def test_each_row_finds_what_it_counts(tmp_path):
    code = tmp_path / "laminar_py" / "left"
    code.mkdir(parents=True)
    (tmp_path / "laminar_py" / "right").mkdir()
    (code / "a.py").write_text(
        "from laminar_py.right import b\n"
        "class Twice:\n    '''One of two. Invariant: there are two.'''\n"
        "@dataclass(frozen=True)\nclass Row:\n"
        + "".join(f"    f{i}: int\n" for i in range(5))
        + "f(1, 2, 3, 4, 5, 6, 7, 8)\n"
        "setattr(a, 'b', 1)\n"
        "class RunConfig(Section):\n    steps: int\n    inner: Inner\n"
        "class Inner(Section):\n    x: int\n"
        "class Pair(Struct, kw_only=True):\n    '''E.g. `Pair(1)`, and no `Pair(1, ...`.'''\n    x: int\n"
    )
    (tmp_path / "laminar_py" / "right" / "b.py").write_text(
        "from laminar_py.left import a\nclass Twice:\n"
        "    def __init__(self):\n" + "        pass\n" * 60 + "x = 1\n" * 600
    )
    table = count(tmp_path)
    assert table.pop("lines") > 600
    assert table.pop("longest constructor, lines") == 61
    assert table.pop("settings") == 2
    assert set(table.values()) == {1}
