"""Reasoning: a prompt may open it, it is never an answer, and one function finds it for all."""

import numpy as np
import pytest

from laminar_contrib.agents.history import assistant_message
from laminar_contrib.code.term import find_program
from laminar_contrib.mathematics.term import MathReward, MathTerm
from laminar_contrib.reward_models.judge import Judge, JudgeTerm
from laminar_contrib.text_terms import ExactTerm, FormatTerm, make_exact, make_format
from laminar_contrib.tools.call_formats import HermesCalls, outside_reasoning
from laminar_py.records.reasoning import after_reasoning, opened_reasoning
from laminar_py.records.trajectory import Prompt
from laminar_py.reward.failures import trials
from tests.reward.requests import make_request

OPENS = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a<think>b</think>c", "a\nc"),
        ("a<think>b", "a"),
        ("a</think>b", "b"),
        ("<think>a</think>b", "\nb"),
        ("<think>a", ""),
        ("<think>a</think>b<think>c</think>d", "\nb\nd"),
        ("<think>a<think>b</think>c", "\nc"),
        ("a<think></think></think>b", "a\n\nb"),
    ],
)
def test_reasoning_is_left_out(text, said):
    assert outside_reasoning(text).strip("\n") == said.strip("\n")


@pytest.mark.parametrize(
    ("text", "after"), [("a", "a"), ("a</think>b", "b"), ("<think>a", ""), ("b<think>a</think>c<think>d", "")]
)
def test_an_answer_stands_behind_the_last_thought(text, after):
    assert after_reasoning(text) == after


@pytest.mark.parametrize(
    ("before", "opened"),
    [
        (OPENS, "<think>\n"),
        ("A: <think>", "<think>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("Think in <think> and </think>, or in <think>. Q: 2+2=", ""),
        ("", ""),
    ],
)
def test_the_text_before_a_response_says_whether_it_begins_in_a_thought(before, opened):
    assert opened_reasoning(before) == opened


@pytest.mark.parametrize(
    ("prompt", "response", "value"),
    [
        (OPENS, r"so \boxed{7}", 0.0),
        (OPENS, r"so \boxed{8}</think> \boxed{7}", 1.0),
        (OPENS, r"so \boxed{7}</think> no", 0.0),
        (OPENS, r"</think><think>\boxed{7}", 0.0),
        ("2+5=", r"\boxed{7}", 1.0),
    ],
)
def test_rewards_never_score_a_thought(prompt, response, value):
    request = make_request(response, prompt=prompt)
    assert MathReward(MathTerm(kind="math"))(request).value == value
    assert make_exact(ExactTerm(pattern=r"boxed\{(\d)\}"))(request).value == value


async def test_the_judge_and_the_sandbox_see_no_thought_that_does_not_end():
    request = make_request("```python\nprint(7)\n```", prompt=OPENS)
    assert find_program(request.text_after_reasoning) == ""
    term = JudgeTerm(kind="judge", urls=("http://127.0.0.1:1/v1",), model="m")
    assert (await Judge(term, None)(request)).value == 0.0  # asks no server


def test_a_format_holds_for_a_thought_that_the_prompt_opens():
    reward = make_format(FormatTerm(pattern="^<think>.*</think>"))
    assert [reward(make_request(text, prompt=OPENS)) for text in ("a\nb</think>7", "7")] == [1.0, 0.0]


def test_a_trial_of_a_reward_answers_behind_the_thought_that_its_prompt_opens():
    prompt = Prompt(id="p0", index=0, text=OPENS, ids=np.array([1], np.int32), answer="7")
    made = trials([prompt], encode=lambda text: np.frombuffer(text.encode(), np.uint8), end=0)
    said = [bytes(trial.request.response_ids[:-1].tolist()).decode() for trial in made]
    assert said == ["</think>7", "</think>"]


@pytest.mark.parametrize(("opened", "count"), [("", 1), ("<think>\n", 0)])
def test_a_draft_call_of_an_agents_turn_that_begins_in_a_thought_is_no_call(opened, count):
    turn = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    draft = assistant_message(turn, HermesCalls(), turn=1, opened=opened)
    assert len(draft.get("tool_calls", ())) == count
    done = assistant_message(f"hm</think>so {turn}", HermesCalls(), turn=1, opened=opened)
    assert (done["content"], len(done["tool_calls"])) == ("hm</think>so", 1)
