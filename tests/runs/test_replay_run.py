"""Whole runs with replay: all dies and the laws hold; under `sync` a resumed run is the run that was not cut."""

import json
import signal
import sqlite3
from contextlib import closing

import pytest

from laminar_lab.audit.queries import accounting
from laminar_lab.audit.verify import verify
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import read_snapshot
from tests.runs.runs import ALONE, TrainProcess

pytestmark = pytest.mark.slow
STEPS = 8
REPLAY = (
    "buffer.replay={share: 0.5, most: 8, by: reward}",
    f"steps={STEPS}",
    "learner.checkpoint_every=3",
    "eval.sets={}",
)
TBA = ("algorithm={name: tba}", "staleness.max_staleness=null", "staleness.policies=[]")


def test_everything_dies_and_replays_are_undone_or_stay_on_record(tmp_path):
    with TrainProcess(tmp_path, *REPLAY, *TBA) as train:
        train.wait_for_step(5)
        for process in train.family():
            process.send_signal(signal.SIGKILL)
        train.process.wait(timeout=60)
    with TrainProcess(tmp_path, *REPLAY, *TBA, resume=True) as train:
        train.end_with(0)
    assert verify(train.run) == []
    account = accounting(train.run).train
    assert account.balanced
    with closing(sqlite3.connect(train.run / "ledger.sqlite")) as ledger:
        by_step = dict(ledger.execute("SELECT step, count(*) FROM replay WHERE NOT undone GROUP BY step"))
    assert account.replayed == sum(by_step.values()) > 0
    assert set(by_step) <= set(range(2, STEPS + 1))
    rows = {row["step"]: row for row in metrics(train.run)}
    assert {step: rows[step]["replay"]["trajectories"] for step in by_step} == by_step
    assert RunReport(read_snapshot(train.run)).replayed is not None


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def learned(run):
    names = ("step", "reward", "trajectories", "trained_tokens", "replay", "loss", "grad_norm", "effective_share")
    return [[row[name] for name in names] for row in metrics(run)]


def start(folder, *, resume=False):
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text("def score(request): return (len(request.response_ids) % 7) / 7")
    reward = f"reward.use=[{folder / 'reward.py'}:score]"
    return TrainProcess(folder, "schedule=sync", *ALONE, *REPLAY, reward, resume=resume)


def test_under_sync_a_resumed_run_replays_the_same_bit_by_bit(tmp_path):
    whole, cut = start(tmp_path / "whole"), start(tmp_path / "cut")
    with whole, cut:
        cut.wait_for_step(4)
        cut.send(signal.SIGINT)
        cut.end_with(130)
        with start(tmp_path / "cut", resume=True) as resumed:
            resumed.end_with(0)
        whole.end_with(0)
    assert learned(cut.run) == learned(whole.run)
    assert sum(row["replay"].get("trajectories", 0) for row in metrics(whole.run)) > 0
    assert verify(cut.run) == []
