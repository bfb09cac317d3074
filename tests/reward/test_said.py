"""What an answer says, for majority votes, and terms of an evaluation set."""

from pathlib import Path

import pytest

from laminar_contrib.mathematics.verify import canonical
from laminar_py.config.reward import RewardConfig, check_sets
from laminar_py.config.section import ConfigError
from laminar_py.records.columns import Column, Source
from tests.reward.requests import make_request
from tests.reward.test_scorer import score, scorer_of

EXACT = {"kind": "exact", "pattern": "#(.*)$"}


@pytest.mark.parametrize(
    "same",
    [("0.5", r"\frac{1}{2}", "1/2", "50%"), ("1,000", "1000", "10^3"), ("(1, 2)", "(1,2)"), ("x+1", "x + 1")],
)
def test_answers_that_are_equal_numbers_or_texts_are_one_vote(same):
    assert len({canonical(answer) for answer in same}) == 1


def test_answers_that_differ_are_votes_of_their_own():
    answers = ["1/2", "1/3", "2", "-2", "x+1", "x-1", "(1, 2)", "2^{10000}", r"\sqrt{2}", r"\unreadable{"]
    assert len({canonical(answer) for answer in answers}) == len(answers)


async def test_an_evaluation_set_is_scored_by_its_own_terms_and_needs_no_columns(tmp_path: Path):
    reward = {"use": [{"kind": "length", "most": 9}], "by_set": {"aime": ["math"], "short": [EXACT]}}
    column = Column(name="hints", source=Source.SCORER)
    requests = [
        make_request(response, index=index, set_name=name, answer="1/2")
        for index, (name, response) in enumerate((("aime", r"\boxed{0.5}"), ("short", "it is #0.5")))
    ]
    async with scorer_of(tmp_path, reward, columns=(column,)) as scorer:
        scores = await score(scorer, *requests)
    assert [(one.value, one.answer) for one in scores] == [(1.0, "1/2"), (0.0, "0.5")]


def test_terms_of_a_set_that_is_not_there_are_refused_by_name():
    reward = RewardConfig.model_validate_json('{"use": ["math"], "by_set": {"aime": ["math"]}}')
    with pytest.raises(ConfigError, match=r"reward.by_set.aime: no such set in eval.sets; name one of these: amc"):
        check_sets(reward, ["amc"])
