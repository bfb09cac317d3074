"""Servers of rewards are looked at before a run: any answer will do, and silence is one line."""

import json
import shutil
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from laminar_contrib.reward_models import judge
from laminar_py.children import landlock
from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.reward import RewardConfig
from laminar_py.config.section import ConfigError
from laminar_py.records.trajectory import Prompt
from laminar_py.reward import WriteFence
from laminar_py.reward.failures import trials
from laminar_py.runtime.preflight import rewards
from laminar_py.runtime.preflight.rewards import check_rewards, check_terms
from tests.data.builders import GOOD, read, written


def fence(folder: Path) -> WriteFence:
    return WriteFence(runs=str(folder / "runs"), shm=str(folder / "shm"))


def judged_at(port):
    judge = {"kind": "judge", "urls": [f"http://127.0.0.1:{port}/v1"], "model": "m"}
    return RewardConfig.model_validate_json(json.dumps({"use": [judge]}))


@pytest.mark.parametrize("status", [200, 401, 404, 500])
def test_whatever_a_server_answers_it_is_there(status):
    class Answering(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        answer = Thread(target=server.handle_request)
        answer.start()
        check_terms(judged_at(server.server_port), SandboxConfig())
        answer.join()


def test_a_server_that_says_nothing_in_time_is_named(monkeypatch):
    monkeypatch.setattr(judge, "ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"urls=http://127.0.0.1:{port}/v1 of judge: does not answer \(timed"
        ):
            check_terms(judged_at(port), SandboxConfig())


def test_it_is_said_how_far_a_long_look_at_the_problems_is(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(rewards, "PROGRESS_S", -1.0)
    reward = RewardConfig.model_validate_json('{"use": {"kind": "length", "most": 9}}')
    check_rewards(reward, [read(written(tmp_path / "a.jsonl", GOOD))], fence=fence(tmp_path), sandbox=None)
    assert f"checking problems of data.train={tmp_path / 'a.jsonl'}: 1 of 1" in caplog.text


def test_problems_that_are_looked_at_are_bounded_and_go_from_the_first_to_the_last(monkeypatch, tmp_path):
    monkeypatch.setattr(rewards, "MOST", 3)
    seen = []
    monkeypatch.setattr(rewards, "check_problem", lambda reward, problem, **place: seen.append(problem.id))
    reward = RewardConfig.model_validate_json('{"use": ["math"]}')
    check_rewards(reward, [read(written(tmp_path / "a.jsonl", *[GOOD] * 7))], fence=fence(tmp_path), sandbox=None)
    assert seen == ["p0", "p2", "p4"]


def test_what_a_function_printed_at_its_import_is_named_where_it_fails(tmp_path):
    (tmp_path / "mine.py").write_text("print('imported')\nraise KeyError(3)\n\ndef score(request): ...\n")
    reward = RewardConfig.model_validate_json(json.dumps({"use": f"{tmp_path / 'mine.py'}:score"}))
    with pytest.raises(ConfigError) as raised:
        check_rewards(reward, [], fence=fence(tmp_path), sandbox=None)
    logs = Path(str(raised.value).split("for the output of its process, see ")[1])
    assert (logs / "reward-0.log").read_text() == "imported\n"
    shutil.rmtree(logs)


def own(folder, text, name="score"):
    """The reward of a user's file `reward.py`."""
    (folder / "reward.py").write_text(text)
    return RewardConfig.model_validate_json(json.dumps({"use": f"{folder / 'reward.py'}:{name}"}))


def tried(folder, text, answers=("4", "7")):
    """Check the reward of a user's file on trials with these right answers."""
    ids = np.array([4], np.int32)
    prompts = [Prompt(id=f"p{at}", index=at, text="2+2=", ids=ids, answer=one) for at, one in enumerate(answers)]
    made = trials(prompts, encode=lambda text: np.array([ord(c) for c in text], np.int32), end=1)
    check_rewards(own(folder, text), [], fence=fence(folder), sandbox=None, trials=made)


def test_a_reward_that_raises_on_every_trial_is_refused_before_a_run(tmp_path):
    with pytest.raises(ConfigError) as caught:
        tried(tmp_path, "def score(request):\n    return float(request.fields['nn'])\n")
    line = str(caught.value)
    assert line.startswith(
        f"reward.use={tmp_path}/reward.py:score: fails on the right answer to prompt 'p0' (a tri"
    )
    assert line.endswith("reward.py:2); it fails on all 4 trials, so mend it: `laminar reward try` tries it")
    assert "KeyError: 'nn'" in line


@pytest.mark.parametrize(
    "body",
    [
        "if not request.answer == '7': raise KeyError('nn')\n    return 1.0",
        "raise TryAgainError('busy')",
        "time.sleep(60)",
    ],
)
def test_a_reward_that_scores_one_trial_or_asks_for_time_is_not_refused(body, tmp_path):
    text = f"import time\nfrom laminar_py.records import TryAgainError\n\ndef score(request):\n    {body}\n"
    own(tmp_path, text)
    reward = {"use": f"{tmp_path / 'reward.py'}:score", "timeout_s": 0.2}
    ids = np.array([4], np.int32)
    prompts = [Prompt(id=one, index=0, text="", ids=ids, answer=one) for one in "47"]
    made = trials(prompts, encode=lambda text: ids, end=1)
    check_rewards(
        RewardConfig.model_validate_json(json.dumps(reward)), [], fence=fence(tmp_path), sandbox=None, trials=made
    )


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        (
            "def score(request): return 1.0\n",
            "scor",
            "defines no function 'scor'; did you mean 'score'? Else define it",
        ),
        ("def score(completions, **kwargs): return [1.0]\n", "score", "takes (completions, **kwargs), not one"),
        ("def score(data_source, solution_str, ground_truth): ...\n", "score", "takes (data_source, solution_str"),
        ("def score(prompts, completions, answer, **kwargs): ...\n", "score", "write def score(request: Scoring"),
        ("score = 1\n", "score", "defines no function 'score'"),
    ],
)
def test_a_reward_function_that_is_missing_or_of_another_trainer_is_one_line(text, name, line, tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_rewards(own(tmp_path, text, name), [], fence=fence(tmp_path), sandbox=None)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not landlock.version(), reason="the kernel has no Landlock")
@pytest.mark.parametrize("place", ["runs/other-1/ledger", "shm/laminar-other/v1"])
def test_the_import_of_a_function_cannot_write_into_runs_and_weights(tmp_path, place):
    for folder in ("runs/other-1", "shm/laminar-other"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/other-1/config.yaml").touch()
    (tmp_path / "mine.py").write_text(
        f"open({str(tmp_path / place)!r}, 'w').write('forged')\n\ndef score(r): ...\n"
    )
    reward = RewardConfig.model_validate_json(json.dumps({"use": f"{tmp_path / 'mine.py'}:score"}))
    with pytest.raises(ConfigError, match="PermissionError"):
        check_rewards(reward, [], fence=fence(tmp_path), sandbox=None)
    assert not (tmp_path / place).exists()
