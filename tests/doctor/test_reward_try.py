"""`laminar reward try` as it is typed: what passes, fails and disagrees, and one line for what is wrong."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from laminar_lab.commands.reward import ScoreTally, open_pools
from laminar_py.cli import main
from laminar_py.config.reward import RewardConfig
from laminar_py.config.section import ConfigError
from laminar_py.records.scoring import Score, TermValue
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


def rows(out):
    return [line.replace("│", " ").split() for line in out.splitlines() if line.startswith("│")]


def mine(tmp_path, body):
    (tmp_path / "mine.py").write_text(f"def score(request):\n    {body}\n")
    return f"reward.use={tmp_path / 'mine.py'}:score"


def test_an_answer_may_be_a_number_as_in_data(try_reward):
    code, out, err = try_reward(RIGHT | {"answer": 7}, RIGHT | {"answer": 8, "reward": 0})
    assert (code, err) == (0, ""), out


def test_rewards_are_counted_and_timed(try_reward):
    code, out, _ = try_reward(RIGHT, {"response": "#3", "answer": "7"}, {"response": "", "answer": "7"})
    assert code == 0, out
    rewards, terms = rows(out)[:2], rows(out)[2:]
    assert rewards == [["0", "2"], ["1", "1"]]
    assert [row[:2] for row in terms] == [["exact", "0.333333"]]
    assert "3 scored, 0 failed, 0 disagree" in out
    assert "3 responses, p50 " in out.splitlines()[-1]


def test_a_single_response_is_one(try_reward):
    assert "\n1 response, p50 " in try_reward(RIGHT)[1]


def test_a_disagreement_is_told_with_its_line_and_is_exit_code_1(try_reward):
    code, out, _ = try_reward(RIGHT, RIGHT | {"response": "#7#8"})
    assert code == 1
    assert "samples.jsonl:2: reward 0, wanted 1 (exact 0)" in out


def test_a_failure_is_told_with_its_place_and_is_exit_code_1(try_reward, tmp_path):
    use = mine(tmp_path, "return request.fields['level']")
    code, out, _ = try_reward(RIGHT, RIGHT | {"level": 1}, overrides=[use])
    assert code == 1
    assert f"samples.jsonl:1: reward_failed: KeyError: 'level' (at {tmp_path / 'mine.py'}:2)" in out
    assert [line[:8] for line in out.splitlines()].count("failed: ") == 1


def test_rewards_that_all_differ_are_told_by_their_spread(try_reward, tmp_path):
    use = mine(tmp_path, "return len(request.response)")
    _, out, _ = try_reward(*({"response": "7" * length} for length in range(1, 12)), overrides=[use])
    assert rows(out)[0] == ["6", "1", "6", "11"]


def test_what_a_function_prints_is_kept_and_named(try_reward, tmp_path):
    _, out, _ = try_reward(RIGHT, overrides=[mine(tmp_path, "print('seen'); return 1")])
    logs = Path(next(line for line in out.splitlines() if line.startswith("output of the rewards")).split(": ")[1])
    assert "seen" in "".join(log.read_text() for log in logs.iterdir())
    shutil.rmtree(logs)


def test_nothing_is_left_where_nothing_was_printed(try_reward, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert try_reward(RIGHT)[0] == 0
    assert not list(tmp_path.glob("laminar-*"))


def test_a_task_of_the_config_that_no_sample_has_is_told(try_reward):
    code, out, _ = try_reward(RIGHT, overrides=["reward.by_task={nosuch: {kind: length, most: 9}}"])
    assert code == 0
    assert "reward.by_task.nosuch: none of these responses has this task" in out


def test_it_is_said_how_far_a_long_one_is(try_reward, monkeypatch):
    monkeypatch.setattr("laminar_lab.commands.reward.PROGRESS_S", -1.0)
    assert "2 responses so far" in try_reward(RIGHT, RIGHT)[2]


def test_seconds_of_equal_responses_are_left_out():
    tally = ScoreTally()
    for elapsed_s in (0.5, 0.0, 0.0):
        term = TermValue(name="math", value=1.0, elapsed_s=elapsed_s)
        tally.add(Score(trajectory_id="g0.0", value=1.0, terms=[term], elapsed_s=elapsed_s))
    assert tally.rewards.p50_p95_ms == ("500.0", "500.0")


def test_samples_that_are_not_there_are_one_line(try_reward, tmp_path, monkeypatch):
    path = tmp_path / "samples.jsonl"
    monkeypatch.setattr(type(path), "write_text", lambda *_: 0)
    code, _, err = try_reward()
    assert (code, err.strip()) == (
        2,
        f"laminar: samples={path}: no such file; name a JSONL file, a line for each response",
    )


@pytest.mark.parametrize(
    ("sample", "overrides", "line"),
    [
        ({"answer": "7"}, (), "samples.jsonl:1: object missing required field `response`"),
        (
            RIGHT | {"task": "b"},
            ("reward.by_task={a: [{kind: length, most: 9}]}", "reward.use=[]"),
            "task 'b' has no",
        ),
        (
            RIGHT | {"response": "7\\boxed{7}"},
            (),
            "jsonl:1: the tokenizer of model.path makes another",
        ),
        (RIGHT, ("reward.use=[{kind: exact, pattern: '('}]",), "reward.use.0='exact': pattern='(': not a"),
        (
            RIGHT,
            ("reward.by_task={a: [{kind: length, most: 9, free: 9}]}",),
            "reward.by_task.a.0='length': free=9: not",
        ),
        (RIGHT, ("reward.use=[best]",), "reward.use.kind=best: unknown"),
        (RIGHT, ("reward.use=[code]",), "samples.jsonl:1: no `tests` among its fields"),
        (RIGHT | {"answer": "\\frac{"}, ("reward.use=[math]",), "samples.jsonl:1: the reference answer"),
        (RIGHT, ("reward.use=[{kind: judge, urls: [http://127.0.0.1:1], model: m}]",), "judge: does not answer"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(try_reward, sample, overrides, line):
    code, _, err = try_reward(sample, overrides=overrides)
    assert code == 2
    assert line in err
    assert len(err.strip().splitlines()) == 1


# an interpreter whose SGLang has the right version and ends at once
FAILING = """#!/bin/sh
if [ "$1" = -c ]; then echo 0.5.23; else echo "ValueError: no weights"; exit 3; fi
"""
TERM = {"kind": "steps", "servers": "prm", "separator_id": 7, "labels": [5, 6]}


def reward_of(folder, **settings) -> RewardConfig:
    (folder / "config.json").write_text("{}")
    (folder / "python").write_text(FAILING)
    (folder / "python").chmod(0o700)
    pool = {"model": str(folder), "python": str(folder / "python"), **settings}
    return RewardConfig.model_validate_json(msgspec.json.encode({"use": [TERM], "servers": {"prm": pool}}))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"gpus": 1}, r"reward\.servers\.prm: SGLang server .* code 3; it last said: ValueError: no weights"),
        ({"gpus": 0}, r"reward\.servers\.prm\.flags\.max-total-tokens=None: on a CPU"),
    ],
)
async def test_a_server_that_does_not_start_is_one_line(tmp_path, settings, complaint, monkeypatch):
    monkeypatch.setattr("laminar_py.engines.sglang.launch.check_compilers", lambda python, *, field: None)
    with pytest.raises(ConfigError, match=complaint) as caught:
        async with open_pools(reward_of(tmp_path, **settings), tmp_path):
            raise AssertionError("it started")
    assert "\n" not in str(caught.value)


async def test_a_reward_without_pools_launches_nothing(tmp_path):
    reward = RewardConfig.model_validate_json(b'{"use": ["math"]}')
    async with open_pools(reward, tmp_path):
        assert list(tmp_path.iterdir()) == []
