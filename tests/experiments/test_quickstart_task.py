"""The little machine and its data, as `prepare.py` writes them."""

import random
import re
from pathlib import Path

import pytest

from laminar_contrib.text_terms import make_exact
from laminar_lab.tiny_models import SPECIAL
from laminar_py.config.loading import load_config
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.records.trajectory import FinishReason
from tests.experiments.folders import load_module, make_data, rows
from tests.reward.requests import make_request

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments/quickstart"
CONFIG = load_config(ROOT / "configs/quickstart.yaml", [])


task = load_module(FOLDER / "task.py")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quickstart")
    make_data(FOLDER / "prepare.py", out)
    return out


def carry_steps(prompt: str, response: str) -> list[bool]:
    """Of every step that leaves the digits 0 to 9: is it right, given the digit before it?"""
    digit, verdicts = int(re.search(r";(\d)x", prompt)[1]), []
    for rule, shown in re.findall(r"[eo]([+*-]\d)=(\d)x", response):
        result = task.apply_rule(rule, digit)
        if not 0 <= result <= 9:
            verdicts.append(result % 10 == int(shown))
        digit = int(shown)
    return verdicts


def test_the_worked_example_of_the_docstring_holds() -> None:
    problem = task.Problem("-2", "*7", 1, 5)
    assert problem.prompt in task.__doc__
    assert f"    {problem.solution()}\n" in task.__doc__
    assert problem.answer == "7"


def test_a_careful_solution_follows_the_rules_to_the_answer() -> None:
    rng = random.Random(0)
    for problem in (task.draw_problem(rng) for _ in range(200)):
        digit = problem.start
        for _ in range(problem.steps):
            digit = task.apply_rule(problem.odd if digit % 2 else problem.even, digit) % 10
        assert problem.answer == str(digit)
        assert all(carry_steps(problem.prompt, problem.solution()))


def test_heldout_prompts_are_300_and_unique(data: Path) -> None:
    prompts = [row["prompt"] for row in rows(data / "heldout.jsonl")]
    assert len(prompts) == len(set(prompts)) == 300


def test_there_are_prompts_for_200_steps(data: Path) -> None:
    assert len(rows(data / "train.jsonl")) >= 200 * CONFIG.rollout.prompts_per_step


def test_demonstrations_are_careless_in_carries_and_borrows_only(data: Path) -> None:
    demonstrations = rows(data / "warm_start.jsonl")
    verdicts = [right for row in demonstrations for right in carry_steps(row["prompt"], row["response"])]
    assert 0.39 < sum(verdicts) / len(verdicts) < 0.41
    machine = r"e[+*-]\d;o[+*-]\d;\dx(\d+)\?"
    for row in demonstrations:
        steps = int(re.fullmatch(machine, row["prompt"])[1])
        left = [int(count) for count in re.findall(r"x(\d+);", row["response"])]
        assert left == list(range(steps - 1, -1, -1))


def test_the_tokenizer_has_a_token_for_each_word(data: Path) -> None:
    assert load_tokenizer(data / "model").encode("e-2;o*7;1x5?").tolist() == [
        len(SPECIAL) + task.WORDS.index(t) for t in ("e-2", ";", "o*7", ";", "1", "x5", "?")
    ]


def test_the_configured_reward_accepts_the_right_answer_alone() -> None:
    (term,) = CONFIG.reward.use
    reward = make_exact(term)
    problem = task.Problem("-2", "*7", 1, 5)

    def value(response: str, finish: FinishReason = FinishReason.STOP) -> float:
        return reward(make_request(response, answer=problem.answer, finish_reason=finish)).value

    assert value(problem.solution()) == 1.0
    assert value(problem.solution(), FinishReason.LENGTH) == 0.0
    assert value(problem.solution()[:-1] + "3") == 0.0
