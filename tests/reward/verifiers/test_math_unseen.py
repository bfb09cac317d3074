"""Pairs that were written before the verifier, by somebody else, and never used to tune it."""

import json
from pathlib import Path

from laminar_contrib.mathematics.verify import MathOutcome, verify

PAIRS = [json.loads(line) for line in Path(__file__).with_name("pairs_unseen.jsonl").read_text().splitlines()]


def is_accepted(pair: dict) -> bool:
    return verify(pair["response"], pair["reference"]).outcome is MathOutcome.RIGHT


def test_there_are_enough_of_them_and_most_are_wrong():
    assert len(PAIRS) >= 150
    assert sum(not pair["right"] for pair in PAIRS) >= 100


def test_nearly_all_verdicts_are_right_and_no_wrong_answer_is_accepted():
    accepted = [pair for pair in PAIRS if is_accepted(pair)]
    assert [pair["why"] for pair in accepted if not pair["right"]] == []
    right = len(accepted) + sum(not pair["right"] for pair in PAIRS)
    assert right / len(PAIRS) >= 0.98
