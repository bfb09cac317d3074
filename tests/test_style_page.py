"""docs/style.md: its sentences follow its rules, and it lists every banned pattern."""

import re
from pathlib import Path

import pytest

from tests.house import BANNED, PATTERNS, banned_in_pages

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "style.md").read_text()
SENTENCES = re.findall(r"^\| (\d+) \| (\d+) \| (.+?) \| (.+?) \|$", PAGE, re.M)
RULES = re.findall(r"^(\d+)\. ", PAGE, re.M)


def test_there_are_twenty_sentences_and_each_shows_a_rule():
    assert [int(number) for number, *_ in SENTENCES] == list(range(1, 21))
    assert {rule for _, rule, *_ in SENTENCES} <= set(RULES)


@pytest.mark.parametrize(("before", "after"), [row[2:] for row in SENTENCES])
def test_a_rewritten_sentence_has_no_banned_pattern(before, after):
    assert before != after
    assert not BANNED.findall(after)


def test_the_page_lists_every_pattern_with_an_example_of_it():
    rows = dict(re.findall(r"^\| `([\w ]+)` \| \*(.+?)\*", PAGE, re.M))
    assert list(rows) == list(PATTERNS)
    for name, example in rows.items():
        assert re.search(PATTERNS[name], example, re.IGNORECASE), name


def test_readme_docs_and_experiments_have_no_banned_pattern():
    assert banned_in_pages(ROOT) == []
