"""Pairs that were written before the verifier's rules, by other people.

Of `pairs_first.jsonl` the first 130 were looked at while its rules were written, the other 110 only afterwards.
`pairs_third.jsonl` was written last, and no rule was changed for it.
"""

import json
from pathlib import Path

import pytest

from laminar_contrib.mathematics.verify import MathOutcome, verify

HERE = Path(__file__).parent
SETS = {
    name: [json.loads(line) for line in (HERE / name).open()]
    for name in ("pairs_unseen.jsonl", "pairs_first.jsonl")
}


def is_accepted(pair: dict) -> bool:
    return verify(pair["response"], pair["reference"]).outcome is MathOutcome.RIGHT


@pytest.mark.parametrize("name", SETS)
def test_there_are_enough_of_them_and_most_are_wrong(name):
    assert len(SETS[name]) >= 150
    assert sum(not pair["right"] for pair in SETS[name]) >= 100


@pytest.mark.parametrize("name", SETS)
def test_nearly_all_verdicts_are_right_and_no_wrong_answer_is_accepted(name):
    pairs = SETS[name]
    accepted = [pair for pair in pairs if is_accepted(pair)]
    assert [pair for pair in accepted if not pair["right"]] == []
    right = len(accepted) + sum(not pair["right"] for pair in pairs)
    assert right / len(pairs) >= 0.98


def test_verdicts_on_pairs_that_no_rule_has_seen():
    pairs = [json.loads(line) for line in (HERE / "pairs_third.jsonl").open()]
    wrong = [pair for pair in pairs if is_accepted(pair) != pair["right"]]
    assert len(wrong) / len(pairs) <= 0.04
    assert [pair["kind"] for pair in wrong if not pair["right"]] in ([], ["base"])  # 21_8, where 21 has no base
