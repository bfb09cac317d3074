"""The reward `math` in a real scorer: verdicts told apart, cut responses, answers that hang."""

import pytest

from laminar_contrib.mathematics.term import MathTerm, fault_in_answer
from laminar_py.records.trajectory import FinishReason, Prompt
from tests.reward.requests import make_request
from tests.reward.test_scorer import score, scorer_of


async def test_right_wrong_and_unparsable_are_told_apart(tmp_path):
    requests = [
        make_request(r"<think>\boxed{3}</think> so \boxed{\frac{1}{2}}", answer="0.5"),
        make_request(r"\boxed{\frac{1}{3}}", answer="1/2", index=1),
        make_request("I do not know.", answer="1/2", index=2),
        make_request(r"\boxed{1/2}", answer="1/2", index=3, finish_reason=FinishReason.LENGTH),
    ]
    async with scorer_of(tmp_path, {"use": ["math"]}) as scorer:
        found = await score(scorer, *requests)
    assert [each.value for each in found] == [1.0, 0.0, 0.0, 0.0]
    texts = [each.terms[0].text.partition(":")[0] for each in found]
    assert texts == ["right", "wrong", "unparsable", "cut by a cap"]


HOSTILE = ["99999999!", "9^{9^{9^9}}", r"\gcd(10^{10^{10}}, 6)", r"\max(9^{9^9}, 1)", r"\gcd(9^{9^9}, 9^{9^8})"]


async def test_hostile_answers_are_bounded_in_time_and_memory_and_hold_up_no_other(tmp_path):
    texts = [*HOSTILE, *["7"] * 20]
    requests = [make_request(rf"\boxed{{{text}}}", index=index) for index, text in enumerate(texts)]
    async with scorer_of(tmp_path, {"use": ["math"], "timeout_s": 5}) as scorer:
        found = await score(scorer, *requests)
    assert all(each.value in (None, 0.0) for each in found[: len(HOSTILE)])
    assert [each.value for each in found[len(HOSTILE) :]] == [1.0] * 20


@pytest.mark.parametrize("answer", [r"\frac{1}{2}", "12", "x^2-1", r"(1,2]"])
def test_answers_of_usual_forms_are_taken(answer):
    assert fault_in_answer(MathTerm(), Prompt(id="p", index=0, text="", ids=None, answer=answer)) is None


@pytest.mark.parametrize("answer", ["", r"\frac{1}{"])
def test_an_answer_that_cannot_be_compared_is_explained(answer):
    fault = fault_in_answer(MathTerm(), Prompt(id="p", index=0, text="", ids=None, answer=answer))
    assert fault
    assert "\n" not in fault
