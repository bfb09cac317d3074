"""Problems of the code recipe, from rows in the forms of public sets."""

import json
import subprocess
import sys

import msgspec

from laminar_contrib.code.term import CodeTerm, fault_in_tests
from tests.builders import make_prompt
from tests.runs.runs import REPO

APPS = {"inputs": [f"{i}\n" for i in range(6)], "outputs": [f"{2 * i}\n" for i in range(6)]}
LINES = {"inputs": [[str(i), "x"] for i in range(6)], "outputs": [[str(i)] for i in range(6)]}
PRIME = [{"type": "stdin_stdout", "input": f"{i}\n", "output": f"{i}\n"} for i in range(40)]
LIVE = [{"testtype": "stdin", "input": f"{i}\n", "output": f"{i}\n", "metadata": {}} for i in range(5)]
CALLS = {"fn_name": "f", "inputs": [[1]] * 6, "outputs": [1] * 6}
ROWS = [
    {"problem": "double", "tests": json.dumps(APPS), "difficulty": "EASY"},
    {"question": "first line", "input_output": json.dumps(LINES)},
    {"problem": "echo", "tests": json.dumps(PRIME)},
    {"problem": "echo again", "tests": json.dumps(LIVE)},
    {"problem": "double", "tests": json.dumps(APPS)},
    {"problem": "a function", "tests": json.dumps(CALLS)},
    {"problem": "few tests", "tests": json.dumps(LIVE[:2])},
    {"problem": "no JSON", "tests": "{"},
    {"problem": "long" * 2000, "tests": json.dumps(APPS)},
]


def prepare(folder):
    """What the script writes of `ROWS`, by prompt."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    script = REPO / "experiments/code_long_cot/prepare.py"
    command = [sys.executable, str(script), str(folder / "rows.jsonl"), "--out", str(folder / "out")]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True)
    lines = [line for path in (folder / "out").iterdir() for line in path.read_text().splitlines()]
    problems = map(json.loads, lines)
    return {problem["prompt"]: problem for problem in problems}, len(lines)


def test_what_can_be_run_stays_and_is_taken_by_the_reward(tmp_path):
    problems, count = prepare(tmp_path)
    assert sorted(problems) == ["double", "echo", "echo again", "first line"]
    assert count == 4
    for problem in problems.values():
        prompt = msgspec.structs.replace(make_prompt(), fields_json=msgspec.json.encode(problem))
        assert fault_in_tests(CodeTerm(), prompt) is None
    assert problems["first line"]["tests"]["inputs"][0] == "0\nx"
    assert len(problems["echo"]["tests"]["inputs"]) == 15


def test_a_second_call_leaves_what_is_there(tmp_path):
    prepare(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    prepare(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
