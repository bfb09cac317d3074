"""The task of tiny_code and its data, as `make_data.py` writes them."""

import importlib
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from laminar_contrib.code.term import fault_in_tests
from laminar_lab.tiny_models import SPECIAL, UNKNOWN
from laminar_py.config.loading import load_config
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.problems import read_prompts
from laminar_py.data.sources import source_at
from laminar_py.data.tokenizer import load_tokenizer
from tests.experiments.folders import make_data, rows

FOLDER = Path(__file__).parents[2] / "experiments/tiny_code"
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
FILES = ("train.jsonl", "heldout.jsonl", "warm_start.jsonl", *(f"model/{name}" for name in MODEL_FILES))
CONFIG = load_config(FOLDER / "tiny_code.yaml", [])


def load(name):
    """A module of the experiment's folder, which finds its neighbours there."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


task = load("task")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny_code")
    make_data(FOLDER / "make_data.py", out)
    return out


def problems(seed, count, *, composed=False):
    rng = random.Random(seed)
    return [task.draw_problem(rng, composed=composed) for _ in range(count)]


def passes(program, tests):
    """True where the program, one of our own, gives every output; an exception is a failure."""
    space = {}
    try:
        exec(program, space)
        given = [space[tests["fn_name"]](*json.loads(json.dumps(arguments))) for arguments in tests["inputs"]]
    except Exception:  # noqa: BLE001 a slip may raise anything
        return False
    return all(
        type(one) is type(other) and one == other for one, other in zip(given, tests["outputs"], strict=True)
    )


def test_the_worked_example_of_the_docstring_holds():
    steps = {"s: drop {}": 2, "s: reverse": None, "s: count {}": "b"}
    by_name = {operation.name: operation for operation in task.OPERATIONS}
    problem = task.Problem(tuple(task.Clause(by_name[name], constant) for name, constant in steps.items()))
    indented = problem.program.replace("\n", "\n    ")
    assert f"\n    {problem.prompt}\n    {indented}\n" in task.__doc__
    assert problem.result("abcbx") == 1


def test_right_programs_pass_all_hidden_tests(data):
    for row in (*rows(data / "heldout.jsonl"), *rows(data / "train.jsonl")[:3_000]):
        assert passes(row["answer"], row["tests"]), row


def test_every_operation_has_slips_that_its_hidden_tests_find():
    rng = random.Random(0)
    for operation in task.OPERATIONS:
        for constant in operation.constants or [None]:
            problem = task.Problem((task.Clause(operation, constant),))
            tests = problem.tests(rng)
            assert len(operation.slips) == 2
            assert passes(problem.program, tests)
            for slip in operation.slips:
                assert not passes(problem.write([slip]), tests), problem.write([slip])


def test_slips_in_longer_programs_are_found_too():
    rng, verdicts = random.Random(1), []
    for problem in (problem for problem in problems(1, 1_000) if problem.level > 1):
        lines = [step.operation.code for step in problem.steps]
        place = rng.randrange(problem.level)
        lines[place] = rng.choice(problem.steps[place].operation.slips)
        verdicts.append(passes(problem.write(lines), problem.tests(rng)))
    assert (
        sum(verdicts) / len(verdicts) < 0.05
    )  # some are right: a list may be sorted the other way and sorted again


def test_hidden_tests_are_eight_and_begin_with_an_edge(data):
    edges = {"x": 0, "s": "", "a": []}
    for row in (*rows(data / "heldout.jsonl"), *rows(data / "train.jsonl")):
        tests = row["tests"]
        assert tests["fn_name"] == "f"
        assert len(tests["inputs"]) == len(tests["outputs"]) == 8
        first, *others = re.match(r"f\((.*?)\): ", row["prompt"])[1].split(",")
        assert tests["inputs"][0][0] == edges[first]
        assert {len(arguments) for arguments in tests["inputs"]} == {1 + len(others)}


def test_a_prompt_has_phrases_and_constants_and_nothing_of_the_tests(data):
    phrases = {re.escape(op.phrase).replace(r"\{\}", r"(\d|[a-z])") for op in task.OPERATIONS}
    phrase = f"({'|'.join(sorted(phrases))})"
    form = re.compile(rf"f\([xsa](,y)?\): {phrase}(, then {phrase}){{0,2}}\n")
    for name in ("train.jsonl", "heldout.jsonl", "warm_start.jsonl"):
        for row in rows(data / name):
            assert form.fullmatch(row["prompt"]), row["prompt"]


def test_hidden_tests_stand_in_no_demonstration(data):
    assert all(set(row) == {"prompt", "response"} for row in rows(data / "warm_start.jsonl"))


def test_no_heldout_prompt_is_trained_on_and_each_is_there_once(data):
    heldout = [row["prompt"] for row in rows(data / "heldout.jsonl")]
    assert len(heldout) == len(set(heldout)) == 300
    for name in ("train.jsonl", "warm_start.jsonl"):
        assert not set(heldout) & {row["prompt"] for row in rows(data / name)}


def test_half_of_the_heldout_programs_occur_nowhere_whatever_their_constants(data):
    composed = [row for row in rows(data / "heldout.jsonl") if row["task"] == "composed"]
    forms = {task.blanked(row["answer"]) for row in composed}
    assert len(composed) == 150
    assert all(row["level"] > 1 for row in composed)
    assert not forms & {task.blanked(row["answer"]) for row in rows(data / "train.jsonl")}
    assert not forms & {task.blanked(row["response"]) for row in rows(data / "warm_start.jsonl")}


def test_heldout_pairs_are_in_all_compositions_and_in_nothing_else():
    assert not any(problem.pairs & task.HELDOUT_PAIRS for problem in problems(2, 500))
    assert all(problem.pairs & task.HELDOUT_PAIRS for problem in problems(2, 500, composed=True))
    followed = {first for first, _ in set(task.can_follow()) - task.HELDOUT_PAIRS}
    assert followed == {operation.name for operation in task.OPERATIONS}


def test_constants_are_blanked_and_operations_are_not():
    assert task.blanked("def f(s,y):\n return s[y:]") == task.blanked("def f(s):\n return s[3:]")
    assert task.blanked("def f(s):\n return s+'b'") == task.blanked("def f(s):\n return s+'t'")
    assert task.blanked("def f(s):\n return s[:3]") != task.blanked("def f(s):\n return s[3:]")


def test_a_second_argument_stands_where_a_constant_would():
    found = [problem for problem in problems(3, 500) if problem.second]
    assert len(found) > 50
    for problem in found:
        assert problem.signature.endswith(",y)")
        assert sum(step.constant == "y" for step in problem.steps) == 1


def test_demonstrations_are_careless_line_by_line():
    rng = random.Random(4)
    lines = [
        (operation.code, task.careless_line(operation, rng)) for _ in range(200) for operation in task.OPERATIONS
    ]
    assert sum(code == line for code, line in lines) / len(lines) == pytest.approx(task.RIGHT, abs=0.02)


def test_few_demonstrations_are_right(data):
    drawn = problems(5, 1_000)
    rng = random.Random(5)
    right = sum(passes(problem.demonstration(rng), problem.tests(rng)) for problem in drawn)
    assert 0.05 < right / len(drawn) < 0.2


def test_every_program_fits_and_problems_suffice(data):
    tokenizer, cap = load_tokenizer(data / "model"), CONFIG.rollout.sampling.max_new_tokens
    heldout, train = (rows(data / f"{name}.jsonl") for name in ("heldout", "train"))
    assert len(train) >= CONFIG.steps * CONFIG.rollout.prompts_per_step
    assert max(len(tokenizer.encode(row["answer"])) for row in (*heldout, *train)) < cap
    assert all(row["answer"].count("\n") <= 3 for row in (*heldout, *train))


def test_the_reward_can_run_every_problem(data):
    (term,) = CONFIG.reward.use
    encoder = PromptEncoder(load_tokenizer(data / "model"), data / "model", CONFIG.data.chat)
    for name in ("heldout", "train"):
        source = source_at(data / f"{name}.jsonl", f"data.{name}")
        for prompt in read_prompts(source, encoder=encoder, max_prompt_tokens=CONFIG.rollout.max_len):
            assert fault_in_tests(term, prompt) is None


def test_the_tokenizer_knows_every_token_and_gives_the_text_back(data):
    tokenizer = load_tokenizer(data / "model")
    unknown = SPECIAL.index(UNKNOWN)
    for problem in (*problems(6, 300), *problems(6, 100, composed=True)):
        text = f"{problem.prompt}{problem.demonstration(random.Random(6))}\n{problem.program}"
        ids = tokenizer.encode(text)
        assert unknown not in ids, text
        assert tokenizer.decode(np.array([*ids, *tokenizer.eos_ids])) == text


def test_the_report_names_the_worst_of_the_seeds():
    run = load("run")
    ends = [(0.9, 0.7), (0.8, 0.6)]
    runs = [
        run.LearnedCode(
            folder="",
            wall_s=600.0 + seed,
            curve=[
                run.CurvePoint(rl_s=0.0, plain=0.1 * seed, composed=0.0),
                run.CurvePoint(rl_s=500.0, plain=plain, composed=composed),
            ],
        )
        for seed, (plain, composed) in enumerate(ends)
    ]
    found = {row.name: round(row.value, 3) for row in run.rows(runs)}
    assert found == {
        "code_pass1_start": 0.05,
        "code_pass1_end": 0.7,
        "code_pass1_plain_end": 0.8,
        "code_pass1_composed_end": 0.6,
        "code_seconds": 601.0,
    }
