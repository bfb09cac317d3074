"""`laminar reward try` as it is typed: what passes, fails and disagrees, and one line for what is wrong."""

import json
import sys

import pytest

from laminar_py.cli import main
from tests.runs.runs import REPO

CONFIG = REPO / "configs/quickstart.yaml"


@pytest.fixture
def try_reward(monkeypatch, capsys, tmp_path):
    """Tries the reward of the quickstart on samples; exit code, standard output and standard error."""

    def run(*samples, overrides=()):
        path = tmp_path / "samples.jsonl"
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        monkeypatch.chdir(REPO)
        monkeypatch.setattr(sys, "argv", ["laminar", "reward", "try", str(CONFIG), str(path), *overrides])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return run


RIGHT = {"response": "o*7=7x0;#7", "answer": "7", "reward": 1}


def test_rewards_are_counted_and_timed(try_reward):
    code, out, _ = try_reward(RIGHT, {"response": "#3", "answer": "7"}, {"response": "", "answer": "7"})
    assert code == 0, out
    assert [line.split() for line in out.splitlines() if line.startswith("│")] == [
        ["│", "0", "│", "2", "│"],
        ["│", "1", "│", "1", "│"],
    ]
    assert "3 responses, p50 " in out.splitlines()[-1]


def test_a_disagreement_is_told_with_its_line_and_is_exit_code_1(try_reward):
    code, out, _ = try_reward(RIGHT, RIGHT | {"response": "#7 or rather #8"})
    assert code == 1
    assert "samples.jsonl:2: reward 0, wanted 1 (exact 0)" in out


def test_a_failure_is_told_with_its_place_and_is_exit_code_1(try_reward, tmp_path):
    (tmp_path / "mine.py").write_text("def score(request):\n    return request.fields['level']\n")
    code, out, _ = try_reward(
        RIGHT, RIGHT | {"level": 1}, overrides=[f"reward.use=[{tmp_path / 'mine.py'}:score]"]
    )
    assert code == 1
    assert f"samples.jsonl:1: reward_failed: KeyError: 'level' (at {tmp_path / 'mine.py'}:2)" in out
    assert [line[:8] for line in out.splitlines()].count("failed: ") == 1


@pytest.mark.parametrize(
    ("sample", "overrides", "line"),
    [
        ({"answer": "7"}, (), "samples.jsonl:1: object missing required field `response`"),
        (
            RIGHT | {"task": "b"},
            ("reward.by_task={a: [{kind: length, most: 9}]}", "reward.use=[]"),
            "task 'b' has no",
        ),
        (RIGHT, ("reward.use=[best]",), "reward.use.kind=best: unknown"),
        (RIGHT, ("reward.use=[code]",), "samples.jsonl:1: `tests` cannot be read"),
        (RIGHT | {"answer": "\\frac{"}, ("reward.use=[math]",), "samples.jsonl:1: the reference answer"),
        (RIGHT, ("reward.use=[{kind: judge, urls: [http://127.0.0.1:1], model: m}]",), "judge: does not answer"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(try_reward, sample, overrides, line):
    code, _, err = try_reward(sample, overrides=overrides)
    assert code == 2
    assert line in err
    assert len(err.strip().splitlines()) == 1
