"""The kind `reasoning_gym`, with the package's own tasks and scorers."""

import ast
import importlib.util
import inspect
import json
import logging
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager

import msgspec
import pytest

from laminar_contrib.environments.reasoning_gym_data import problems
from laminar_contrib.environments.reasoning_gym_kind import (
    EVALUATING,
    REFUSED,
    ReasoningGymEnvironment,
    open_reasoning_gym,
)
from laminar_py.config.environment import ENVIRONMENTS
from laminar_py.config.section import ConfigError
from laminar_py.data.problems import OWN_FIELDS
from laminar_py.environment.protocol import End, Observation, Problem
from tests.environment.text_story import TextStory
from tests.environment.turns import HOME

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
SCRIPT = "laminar_contrib.environments.reasoning_gym_data"


def problem_of(row):
    """A row as an environment gets it, over JSON and the wire."""
    read = json.loads(json.dumps(row))
    fields = {name: value for name, value in read.items() if name not in OWN_FIELDS}
    whole = Problem(prompt=read["prompt"], answer=read["answer"], task=read["task"], fields=fields)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=Problem)


def rows_of(task, *, size=1, seed=0, **config):
    return list(problems(task, size=size, seed=seed, config=config))


@asynccontextmanager
async def opened(**given):
    async with open_reasoning_gym(ReasoningGymEnvironment(**given), HOME) as make:
        yield make


async def score(row, said, **given):
    async with opened(**given) as make:
        environment = make()
        assert environment.reset(problem_of(row)) == Observation()
        answer = environment.step(said)
    assert isinstance(answer, End)
    return answer.reward


@needs_package
@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("{}", 1.0),
        (" {}\n", 1.0),
        ("It is <answer> {} </answer>, not <b>7</b>.", 1.0),
        ("<answer>7</answer> no: <answer>{}</answer>", 1.0),
        ("<think>perhaps 7</think>{}", 1.0),
        ("perhaps 7</think>{}", 1.0),
        ("<think>{}", 0.0),
        ("<answer>{}</answer></think>", 0.0),
        ("<answer></answer>", 0.0),
        ("", 0.0),
    ],
)
async def test_the_answer_is_in_tags_or_alone_behind_the_reasoning(said, reward):
    (row,) = rows_of("chain_sum")
    assert await score(row, said.replace("{}", row["answer"])) == reward


@needs_package
async def test_a_wrong_answer_is_worth_what_the_scorer_says():
    (row,) = rows_of("gcd")
    assert await score(row, row["answer"]) == 1.0
    assert await score(row, f"{row['answer']}7") < 1.0


@needs_package
async def test_a_pattern_says_where_the_answer_stands():
    (row,) = rows_of("chain_sum")
    assert await score(row, f"1 #{row['answer']} 2", pattern=r"#(\S+)") == 1.0
    assert await score(row, row["answer"], pattern=r"#(\S+)") == 0.0


@needs_package
async def test_a_scorer_that_raises_at_text_means_a_wrong_answer_and_is_told_once(caplog):
    rows = rows_of("prime_factorization", size=3)
    with caplog.at_level(logging.WARNING):
        async with opened() as make:
            for row in rows:
                environment = make()
                environment.reset(problem_of(row))
                assert environment.step("I do not know") == End(0.0)
                assert environment.step(row["answer"]) == End(1.0)
    assert caplog.text.count("the scorer of prime_factorization fails on some answers") == 1


@needs_package
async def test_settings_of_a_task_go_with_its_problems():
    small, usual = (
        next(problems("puzzle24", size=1, seed=4, config=config, evaluates_answers=True))
        for config in ({"max_value": 6}, {})
    )
    assert await score(small, small["answer"], evaluates_answers=True) == 1.0
    assert await score(usual, "8*3*1*1", evaluates_answers=True) == 1.0
    assert await score(small, "8*3*1*1", evaluates_answers=True) < 0.1, "8 is more than its numbers may be"


@needs_package
async def test_every_task_is_refused_or_gives_its_own_answer_1_and_nothing_0():
    from reasoning_gym.factory import DATASETS

    async with opened(evaluates_answers=True) as make:
        for task in sorted(set(DATASETS) - set(REFUSED) - {"composite"}):  # which is made of others
            (row,) = problems(task, size=1, seed=5, config={}, evaluates_answers=True)
            environment = make()
            environment.reset(problem_of(row))
            assert environment.step(f"<answer>{row['answer']}</answer>").reward == pytest.approx(1.0), task
            assert environment.step("").reward == 0.0


@needs_package
@pytest.mark.parametrize("task", sorted(REFUSED))
async def test_a_task_is_refused_for_a_reason_that_holds(task):
    import reasoning_gym

    with pytest.raises(ConfigError, match=f"reasoning-gym task {task}: .*; choose another") as caught:
        rows_of(task)
    assert "\n" not in str(caught.value)
    tried = reasoning_gym.create_dataset(task, size=6, seed=1)
    entries = [json.loads(json.dumps(tried[place])) for place in range(6)]
    if task == "game_of_life_halting":
        assert 1.0 in [tried.score_answer("banana", entry) for entry in entries]
    else:
        assert all(tried.score_answer(entry["answer"], entry) < 0.1 for entry in entries)


def _evaluates(dataset):
    """True where a scorer gives the answer to a function that runs it."""
    code = ast.parse(textwrap.dedent(inspect.getsource(dataset.score_answer)))
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call)]
    names = {"eval", "exec", "parse_expr", "sympify"}
    return any(
        getattr(call.func, "id", getattr(call.func, "attr", "")) in names and "entry" not in ast.unparse(call)
        for call in calls
    )


@needs_package
def test_tasks_that_run_answers_are_those_whose_scorers_do():
    from reasoning_gym.factory import DATASETS

    assert {task for task, (dataset, _) in DATASETS.items() if _evaluates(dataset)} == EVALUATING


@needs_package
@pytest.mark.parametrize("task", ["spiral_matrix", "countdown"])
async def test_an_answer_runs_only_where_that_is_allowed(task, tmp_path):
    with pytest.raises(ConfigError, match=r"runs the model's answer as Python code.*or set evaluates_answers"):
        rows_of(task)
    (row,) = problems(task, size=1, seed=0, config={}, evaluates_answers=True)
    mark = tmp_path / "mark"
    attack = f"__import__('os').mkdir('{mark}')"
    async with opened() as make:
        with pytest.raises(ConfigError, match="runs the model's answer"):
            make().reset(problem_of(row))
    assert await score(row, attack, evaluates_answers=True) < 0.1
    assert mark.exists(), "or the task may be allowed"


@needs_package
@pytest.mark.parametrize(
    "fields", [{}, {"entry": "4"}, {"entry": {"metadata": {}}}, {"entry": {"metadata": None}}, {"entry": None}]
)
async def test_a_problem_that_the_script_did_not_write_says_so(tmp_path, fields):
    async with opened() as make:
        answer, _ = await TextStory(make, Problem(prompt="2+2=", fields=fields), tmp_path).say()
    assert f"no `entry` of reasoning-gym; write problems with python -m {SCRIPT}" in answer.detail


@needs_package
async def test_an_answer_is_judged_in_another_process_too(tmp_path):
    (row,) = rows_of("chain_sum")
    async with opened() as make:
        story = TextStory(make, problem_of(row), tmp_path)
        assert (await story.say())[0].failure is None
        story.move()
        answer, _ = await story.say(row["answer"])
    assert (answer.ends, answer.reward) == (True, 1.0)


@needs_package
def test_the_script_writes_problems_of_this_projects_form(tmp_path):
    out = tmp_path / "data" / "sums.jsonl"
    given = ["chain_sum", "min_terms=3", "--size", "20", "--seed", "9", "--out", str(out), "max_terms=3"]
    done = subprocess.run([sys.executable, "-m", SCRIPT, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = list(map(json.loads, out.read_text().splitlines()))
    assert rows == rows_of("chain_sum", size=20, seed=9, min_terms=3, max_terms=3)
    assert len(rows) == len({row["prompt"] for row in rows}) > 15
    assert all(row["prompt"].count("+") + row["prompt"].count("-") >= 2 for row in rows)


@needs_package
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["boxnet"], "reasoning-gym task boxnet: gives no answer of its own"),
        (["sums"], "reasoning-gym task sums: no such task"),
        (["chain_sum", "terms=3"], "cannot be made with .*terms.*mend them"),
        (["chain_sum", "min_terms"], "min_terms: no setting of a task; write key=value"),
        (["chain_sum", "seed=3"], "seed=3: no setting of a task"),
    ],
)
def test_a_mistake_at_the_script_is_one_line_and_no_file(tmp_path, given, words):
    from laminar_contrib.environments.reasoning_gym_data import main

    with pytest.raises(SystemExit, match=words) as caught:
        main([*given, "--size", "2", "--out", str(tmp_path / "out.jsonl")])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


async def test_without_the_package_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install laminar-py\[reasoning-gym\]"):
        async with opened():
            pass


def test_a_wrong_pattern_is_refused_before_anything_is_made():
    with pytest.raises(ValueError, match="has no group"):
        ENVIRONMENTS.get("reasoning_gym").settings.model_validate({"kind": "reasoning_gym", "pattern": "4"})
