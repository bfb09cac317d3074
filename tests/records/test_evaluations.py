"""Figures of evaluations: against closed forms, on synthetic answers."""

from itertools import combinations
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.records.evaluations import (
    EvalAnswer,
    answer_id,
    pass_at_k,
    pass_id,
    pass_number,
    set_figures,
    set_of,
)
from tests.builders import make_answers


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_that_have_a_right_one(counts):
    number, right, k = counts
    answers = [True] * right + [False] * (number - right)
    assert pass_at_k(number, right, k) == pytest.approx(fmean(any(some) for some in combinations(answers, k)))


def test_pass_at_k_of_many_problems_is_the_chance_that_their_rates_give():
    draws, rate, samples = Random(3), 0.2, 32
    rewards = [[float(draws.random() < rate) for _ in range(samples)] for _ in range(2_000)]
    figures = set_figures(make_answers(rewards), samples=samples, verdicts=["math"])
    assert list(figures.pass_at) == [1, 2, 4, 8, 16, 32]
    for k, estimate in figures.pass_at.items():
        assert estimate.value == pytest.approx(1 - (1 - rate) ** k, abs=0.02), k
        assert estimate.low <= 1 - (1 - rate) ** k <= estimate.high, k
    assert figures.pass_at[1] == figures.mean


@pytest.mark.parametrize(("samples", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (30, [1, 2, 4, 8, 16, 30])])
def test_pass_at_k_ends_with_the_number_of_samples(samples, sizes):
    figures = set_figures(
        make_answers([[1.0] + [0.0] * (samples - 1), [0.0] * samples]), samples=samples, verdicts=["math"]
    )
    assert list(figures.pass_at) == sizes
    assert figures.pass_at[samples].value == 0.5, "one of two problems is solved"
    assert samples == 1 or f"pass@{samples} 0.500" in figures.describe()


def test_the_interval_of_a_mean_is_that_of_problems_and_not_of_answers():
    solved = [[float(problem % 2)] * 50 for problem in range(100)]  # its deviation is 0.5, whatever the samples
    figures = set_figures(make_answers(solved), samples=50, verdicts=["math"])
    error = 1.96 * 0.5 / 100**0.5
    assert (figures.mean.low, figures.mean.high) == pytest.approx((0.5 - error, 0.5 + error), abs=0.02)


def test_a_majority_is_over_what_answers_say_and_what_says_nothing_has_no_vote():
    rewards = [[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    said = [["7", "4", "4", "5"], ["3", "3", "4", ""], ["", "", "", "4"], ["9", "4", "", ""]]
    figures = set_figures(make_answers(rewards, answers=said), samples=4, verdicts=["math"])
    assert figures.majority.value == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    assert set_figures(make_answers(rewards), samples=4, verdicts=["math"]).majority is None


def test_what_has_no_score_is_left_out_and_counted():
    figures = set_figures(make_answers([[1.0, None], [0.0, 0.0], [None, None]]), samples=2, verdicts=["math"])
    assert (figures.problems, figures.unscored, figures.mean.value) == (3, 3, 0.5)
    assert figures.pass_at[2].value == 0.0, "the first problem has one scored answer"
    assert set_figures(make_answers([[None], [None]]), samples=1, verdicts=["math"]) is None


def test_rewards_other_than_0_and_1_are_no_accuracy():
    figures = set_figures(make_answers([[0.5, 0.0], [1.0, 0.0]]), samples=2, verdicts=["math"])
    assert (figures.name, figures.mean.value, figures.pass_at) == ("mean reward", 0.375, {})
    assert figures.truncated.value == 0.5
    assert (figures.length_p50, figures.length_p95) == (20, 21)


def test_a_bonus_that_is_0_or_1_is_no_accuracy():
    """Only a declared verdict is, and only where it is the whole reward."""
    values = [[1.0, 0.0], [1.0, 1.0]]
    bonus = set_figures(make_answers(values, terms={"format": values}), samples=2, verdicts=["math"])
    assert (bonus.name, bonus.pass_at, bonus.terms["format"].pass_at) == ("mean reward", {}, {})
    zeros = [[0.0, 0.0], [0.0, 0.0]]
    beside = set_figures(
        make_answers(values, terms={"math": values, "format": zeros}), samples=2, verdicts=["math"]
    )
    assert (beside.name, beside.pass_at) == ("mean reward", {})
    assert beside.terms["math"].pass_at[2].value == 1.0


def test_figures_do_not_depend_on_the_order_in_which_answers_come():
    answers = make_answers([[1.0, 0.0, 1.0], [0.0, None, 0.0], [1.0, 1.0, 1.0]])
    for seed in range(5):
        mixed = Random(seed).sample(answers, len(answers))
        assert set_figures(mixed, samples=3, verdicts=["math"]) == set_figures(
            answers, samples=3, verdicts=["math"]
        )


def test_a_pass_and_its_answers_are_named_by_number_set_problem_and_sample():
    group = pass_id(4, "aime-2024")
    assert (group, set_of(group), pass_number(group)) == ("e4-aime-2024", "aime-2024", 4)
    assert answer_id(group, 12, 3, samples=32) == "e4-aime-2024.12.3"
    assert (set_of(pass_id(0)), answer_id(pass_id(0), 5, 0, samples=1)) == ("", "e0.5")


def test_a_verdict_beside_a_bonus_has_its_accuracy_and_pass_at_k_and_the_bonus_its_mean():
    right, bonus = [[1.0, 0.0], [0.0, 0.0]], [[0.1, 0.2], [0.1, 0.0]]
    rewards = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(right, bonus, strict=True)]
    figures = set_figures(
        make_answers(rewards, terms={"math": right, "/home/me/rewards.py:short": bonus}),
        samples=2,
        verdicts=["math"],
    )
    assert (figures.is_accuracy, figures.pass_at) == (False, {})
    assert {k: one.value for k, one in figures.terms["math"].pass_at.items()} == {1: 0.25, 2: 0.5}
    assert figures.terms["/home/me/rewards.py:short"].mean.value == pytest.approx(0.1)
    assert figures.terms["/home/me/rewards.py:short"].pass_at == {}
    assert ", math accuracy 0.250 pass@2 0.500, short 0.100, " in figures.describe()
    other = set_figures(
        make_answers(rewards, terms={"math": bonus, "/home/me/rewards.py:short": bonus}), samples=2
    )
    assert other.mean == figures.mean
    assert other.exact != figures.exact, "the audit compares terms"


def test_a_term_that_is_the_whole_reward_is_told_once_unless_its_weight_hides_its_accuracy():
    right = [[1.0, 0.0], [0.0, 0.0]]
    plain = set_figures(make_answers(right, terms={"math": right}), samples=2, verdicts=["math"])
    assert "math" not in plain.describe()
    doubled = set_figures(
        make_answers([[2.0, 0.0], [0.0, 0.0]], terms={"math": right}), samples=2, verdicts=["math"]
    )
    assert doubled.describe().startswith(
        "mean reward 0.500 (0.000 to 1.000) on 2 problems x 2, math accuracy 0.250"
    )


def test_tasks_of_a_set_may_have_terms_of_their_own_and_what_has_no_score_counts_in_none():
    answers = [
        EvalAnswer(problem=0, sample=0, reward=1.0, terms={"math": 1.0}, length=3),
        EvalAnswer(problem=1, sample=0, reward=0.0, terms={"code": 0.0}, length=3),
        EvalAnswer(problem=2, sample=0, reward=None, length=3),
    ]
    figures = set_figures(answers, samples=1, verdicts=["math"])
    assert {name: term.mean.value for name, term in figures.terms.items()} == {"math": 1.0, "code": 0.0}
