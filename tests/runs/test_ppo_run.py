"""A whole run of PPO with one response a prompt: its critic comes back with the learner, and learns."""

import json
import sqlite3
from contextlib import closing

import pytest

from laminar_lab.audit.verify import verify
from laminar_py.learner.marker import read_marker
from tests.runs.runs import TrainProcess
from tests.runs.test_train import kill_part, summary_of

SETTINGS = [
    "relay.nodes=1",
    "steps=8",
    "learner.world_size=2",
    "rollout.group_size=1",
    "rollout.prompts_per_step=16",
    "algorithm.name=ppo",
    "algorithm.critic.lr=3e-3",
    "algorithm.updates_per_step=2",
    "packer.max_tokens=512",
]


@pytest.mark.slow
def test_a_learner_that_is_killed_continues_with_its_critic_and_keeps_the_laws(tmp_path):
    (tmp_path / "reward.py").write_text("def score(request): return float(len(request.response_ids) % 3)")
    with TrainProcess(tmp_path, *SETTINGS, f"reward.use=[{tmp_path / 'reward.py'}:score]") as train:
        train.wait_for_step(3)
        kill_part(train, "learner-0")
        train.end_with(0)
    assert verify(train.run) == []
    assert sum(count for part, count in summary_of(train.run)["restarts"].items() if "learner" in part) >= 1
    rows = [json.loads(line) for line in (train.run / "metrics.jsonl").read_text().splitlines()]
    figures = {row["step"]: row["critic"] for row in rows}
    assert figures[1]["value_mean"] == 0.0
    assert figures[8]["value_mean"] != 0.0, "a critic from before its first step would say 0"
    assert all(one["not_finite"] == 0 and one["value_loss"] > 0 for one in figures.values())
    newest = max((train.run / "checkpoints").glob("step-*"), key=lambda path: read_marker(path).step)
    assert read_marker(newest).has_critic
    with closing(sqlite3.connect(train.run / "ledger.sqlite")) as ledger:
        (alarms,) = ledger.execute("SELECT count(*) FROM event WHERE kind = 'alarmed'").fetchone()
    assert alarms == 0
