"""The task of countdown, its data as `make_data.py` writes them, and its verifier."""

import json
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from experiments.countdown import reward, run
from laminar_py.config.loading import load_config
from laminar_py.config.rollout import Schedule
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.records.scoring import ScoringRequest
from laminar_py.records.trajectory import FinishReason
from tests.experiments.folders import load_module, make_data, rows

FOLDER = Path(__file__).parents[2] / "experiments/countdown"
CONFIG = load_config(FOLDER / "countdown.yaml", [])
NONE = np.zeros(0, dtype=np.int32)


task = load_module(FOLDER / "task.py")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("countdown")
    make_data(FOLDER / "make_data.py", out)
    return out


def scored(response, *numbers, finish_reason=FinishReason.STOP):
    request = ScoringRequest(
        trajectory_id="a",
        prompt="",
        response=response,
        answer="",
        finish_reason=finish_reason,
        prompt_ids=NONE,
        response_ids=NONE,
        logprobs=NONE.astype(np.float32),
        fields_json=json.dumps({"numbers": numbers}).encode(),
    )
    return reward.reached(request)


def brute_force(numbers):
    """Every expression of the numbers, the first operator fastest, with its value or None, by Python itself."""
    for reverse in product("+-*", repeat=len(numbers) - 1):
        text, steps = str(numbers[0]), []
        for operator, number in zip(reversed(reverse), numbers[1:], strict=True):
            text = f"({text}){operator}{number}"
            steps.append(eval(text))
        yield reversed(reverse), steps[-1] if all(0 <= step <= 30 for step in steps) else None


def prompts_and_trials(data):
    found = rows(data / "warm_start.jsonl")
    return [(row["prompt"], row["response"].count(";") + 1, row["response"]) for row in found]


def numbers_of(prompt):
    return [int(number) for number in prompt.removesuffix("?").split()]


def test_the_worked_example_of_the_docstring_holds():
    problem = task.Problem((7, 3, 4, 1))
    text = "".join(line.strip() for line in task.__doc__.splitlines() if line.startswith("    "))
    assert f"`{problem.prompt}`" in task.__doc__
    assert text == problem.search


def test_the_verifier_agrees_with_brute_force():
    rng = random.Random(0)
    for _ in range(200):
        numbers = [rng.randint(1, 10) for _ in range(rng.choice((3, 4)))]
        for operators, value in brute_force(numbers):
            steps = zip(operators, numbers[1:], strict=True)
            claim = str(numbers[0]) + "".join(f"{operator}{number}=x" for operator, number in steps)
            assert scored(f"1+1=2;{claim}!", *numbers) == (value == 24)


def test_a_search_ends_on_the_first_solution_of_brute_force():
    for problem in random.Random(1).sample(task.all_problems(), 200):
        values = [value for _, value in brute_force(problem.numbers)]
        assert problem.num_trials == values.index(24) + 1 == problem.search.count(";") + 1
        assert scored(problem.search, *problem.numbers) == 1


def test_what_is_claimed_without_the_numbers_or_the_end_is_worth_nothing():
    assert scored("7*3=21+4=25-1=24!", 7, 3, 4, 1) == 1
    assert scored("7*3=21+4=25-1=24", 7, 3, 4, 1) == 0
    assert scored("7*3=21+4=25-1=24!", 7, 3, 4, 1, finish_reason=FinishReason.LENGTH) == 0
    assert scored("7*3=21+4=25-1=24!", 3, 7, 4, 1) == 0
    assert scored("8*3=24!", 7, 3, 4, 1) == 0
    assert scored("7*3=21+4=25+1=24!", 7, 3, 4, 1) == 0
    assert scored("7*3=21+4=25-1=24;!", 7, 3, 4, 1) == 0


def test_right_demonstrations_are_never_longer_than_the_limit_and_careless_ones_always_are(data):
    lengths = {True: set(), False: set()}
    for prompt, trials, response in prompts_and_trials(data):
        lengths[scored(response, *numbers_of(prompt)) == 1].add(trials)
    assert max(lengths[True]) == task.DEMONSTRATED < min(lengths[False])
    assert max(lengths[False]) == task.PATIENCE > len(task.OPERATORS) ** 3


def test_no_right_demonstration_changes_a_third_operator(data):
    for prompt, _, response in prompts_and_trials(data):
        numbers = numbers_of(prompt)
        if len(numbers) == 4 and scored(response, *numbers) == 1:
            third = {trial.split("=")[2].lstrip("0123456789x")[0] for trial in response.split(";")}
            assert third == {"+"}


def test_careless_demonstrations_mostly_go_round_in_circles():
    rng = random.Random(2)
    changed = [9 in list(task.careless_trials(rng))[:10] for _ in range(2_000)]
    assert sum(changed) / len(changed) == pytest.approx(task.CHANGES, abs=0.03)


def test_no_demonstration_changes_a_third_operator_twice(data):
    for _, _, response in prompts_and_trials(data):
        third = {
            trial.split("=")[2].lstrip("0123456789x")[0] for trial in response.split(";") if trial.count("=") == 3
        }
        assert third <= {"+", "-"}


def test_no_heldout_problem_is_trained_on_and_each_is_there_once(data):
    heldout = [row["prompt"] for name in run.GREEDY for row in rows(data / f"{name}.jsonl")]
    assert len(heldout) == len(set(heldout)) == 300
    for name in ("train", "warm_start"):
        assert not set(heldout) & {row["prompt"] for row in rows(data / f"{name}.jsonl")}


def test_long_problems_need_more_trials_than_any_right_demonstration(data):
    one, two, short = ([row["trials"] for row in rows(data / f"{name}.jsonl")] for name in run.GREEDY)
    assert max(short) <= task.DEMONSTRATED < min(one)
    assert max(one) <= 2 * task.DEMONSTRATED < min(two)
    assert len(one) == len(two) == 100
    assert {row["level"] for row in rows(data / "train.jsonl")} == {1, 2, 3}


def test_every_search_fits_and_problems_suffice(data):
    tokenizer, cap = load_tokenizer(data / "model"), CONFIG.rollout.sampling.max_new_tokens
    searches = (task.Problem(tuple(numbers_of(row["prompt"]))).search for row in rows(data / "two_changes.jsonl"))
    assert max(len(tokenizer.encode(search)) + 1 for search in searches) <= cap
    assert len(rows(data / "train.jsonl")) >= CONFIG.steps * CONFIG.rollout.prompts_per_step


def accuracy(long):
    return run.LongAccuracy(one_change=long, two_changes=long)


def search(*curve, sampled=0.0):
    points = [run.AccuracyPoint(rl_s=rl_s, long=accuracy(long), short=0.9) for rl_s, long in curve]
    samples = run.Sampled(mean=accuracy(sampled), any_of_8=accuracy(0.25))
    return run.LearnedSearch(
        folder="", rl_s=curve[-1][0], curve=points, start_sampled=samples, end_sampled=samples
    )


def test_figures_are_the_worst_of_the_seeds_and_times_their_median():
    seeds = [
        run.SeedResult(
            start=run.Imitated(steps=800, elapsed_s=30.0),
            longer=run.Imitated(steps=8_000, elapsed_s=330.0),
            supervised=search((0.0, 0.1)),
            rl={
                Schedule.ASYNC: search((0.0, 0.0), (100.0, end), (300.0, end), sampled=0.05),
                Schedule.SYNC: search((0.0, 0.0), (200.0, 0.4), (400.0, 0.4)),
            },
        )
        for end in (0.8, 0.5, 0.3)
    ]
    found = {row.name: row.value for row in run.rows(seeds)}
    assert found == {
        "new_skill_gain": pytest.approx(0.25),  # above samples, which are better than greedy answers
        "new_skill_gain_two_changes": pytest.approx(0.25),
        "new_skill_over_supervised": pytest.approx(0.2),
        "new_skill_over_any_of_8": pytest.approx(0.05),
        "countdown_short_end": 0.9,
        "countdown_seconds": 330.0,
        "countdown_async_over_sync_time": pytest.approx(0.4),  # 80 s of 200
    }


def test_without_a_skill_of_sync_there_is_no_time_to_reach_it():
    flat = search((0.0, 0.0), (100.0, 0.0))
    one = run.SeedResult(
        start=run.Imitated(steps=800, elapsed_s=30.0),
        longer=run.Imitated(steps=8_000, elapsed_s=330.0),
        supervised=flat,
        rl=dict.fromkeys(Schedule, flat),
    )
    found = {row.name: row.value for row in run.rows([one])}
    assert found["countdown_async_over_sync_time"] is None


def test_a_curve_has_every_point_of_its_settings():
    points = run.expected_points(CONFIG)
    assert {step for step, name in points if name == "short"} == set(range(0, 201, 10))
    assert {step for step, name in points if name == "one_change_sampled"} == {0, 200}
    once = load_config(FOLDER / "countdown.yaml", [f"{name}={value}" for name, value in run.UNUSED.items()])
    assert run.expected_points(once) == {(step, name) for step in (0, 1) for name in CONFIG.eval.sets}
