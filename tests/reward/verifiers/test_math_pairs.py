"""Verdicts of the math verifier on pairs that were written beside it (`pairs_seen.jsonl`)."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from laminar_contrib.mathematics.extraction import extract_answer
from laminar_contrib.mathematics.verify import MathOutcome, check_reference, verify

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "pairs_seen.jsonl").read_text().splitlines()]
KINDS = sorted({pair["kind"] for pair in PAIRS})
UNREAD = 6  # references of kinds that are compared as text only


def is_right(pair):
    return verify(pair["response"], pair["reference"]).outcome is MathOutcome.RIGHT


@pytest.mark.parametrize("kind", KINDS)
def test_every_verdict_is_the_expected_one(kind):
    wrong = [pair for pair in PAIRS if pair["kind"] == kind and is_right(pair) != pair["right"]]
    assert not wrong


def test_rows_that_are_approximations_are_right_where_approximations_are_allowed():
    rows = [pair for pair in PAIRS if pair.get("approximate") and "approx" not in pair["response"]]
    assert len(rows) >= 6
    assert all(
        verify(row["response"], row["reference"], approximate=True).outcome is MathOutcome.RIGHT for row in rows
    )


def test_the_pairs_are_of_all_kinds_and_many_are_wrong():
    right = defaultdict(int)
    for pair in PAIRS:
        right[pair["right"]] += 1
    assert len(PAIRS) >= 150
    assert right[False] >= 60
    assert len(KINDS) >= 8


def test_a_response_that_gives_the_reference_is_right_whatever_it_is():
    references = {pair["reference"] for pair in PAIRS}
    assert all(verify(f"So $\\boxed{{{text}}}$.", text).outcome is MathOutcome.RIGHT for text in references)


def test_nearly_all_references_can_be_read():
    complaints = [check_reference(pair["reference"]) for pair in PAIRS]
    assert sum(complaint is not None for complaint in complaints) <= UNREAD


def test_a_wrong_answer_stays_wrong_with_the_sides_exchanged():
    for pair in PAIRS:
        answer = extract_answer(pair["response"])
        is_two_way = not pair.get("approximate") and "_" not in pair["reference"]
        is_two_way = is_two_way and pair["kind"] not in ("unit", "extraction", "mixed")
        if answer is not None and not pair["right"] and is_two_way:
            assert verify(f"\\boxed{{{pair['reference']}}}", answer).outcome is not MathOutcome.RIGHT, pair
