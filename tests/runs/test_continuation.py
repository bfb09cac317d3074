"""A run that was stopped and resumed is the run that was not, bit by bit, where steps leave nothing in flight."""

import json
import re
import shutil
import signal
import sqlite3
from contextlib import closing

import pytest

from laminar_lab.audit.queries import Filters, listing
from laminar_lab.audit.verify import verify
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.trajectory import Kind, Status
from laminar_py.runtime.orchestrator.checkpoints import find_checkpoint
from tests.runs.runs import ALONE, REPO, TrainProcess, forget_versions

STEPS = 4
LEARNED = (
    "step",
    "reward",
    "trajectories",
    "trained_tokens",
    "staleness_max",
    "loss",
    "grad_norm",
    "entropy",
    "kl_behaviour_k3",
    "effective_share",
    "advantage_std",
    "mismatch_max",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, and one that Ctrl-C cut, that was tried with other settings, and resumed; both trained all steps."""
    folder = tmp_path_factory.mktemp("continuation")
    whole, cut = start(folder / "whole"), start(folder / "cut")
    try:
        with whole, cut:
            cut.wait_for_step(2)
            cut.send(signal.SIGINT)
            output = cut.end_with(130)
            assert "--resume" in output, "how to go on"
            refusals = [go_on_with(cut, setting) for setting in (another_model(cut), "seed=9")]
            with start(folder / "cut", resume=True) as resumed:
                resumed.end_with(0)
            whole.end_with(0)
        yield whole.run, cut.run, refusals
    finally:
        for run in (whole.run, cut.run):
            forget_versions(run)  # one that failed left them


def another_model(cut):
    model = shutil.copytree(REPO / "experiments/quickstart/data/model", cut.folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    return f"model.path={model}"


def go_on_with(cut, setting):
    """Exit code and output."""
    before = learned(cut.run), find_checkpoint(RunFolder(cut.run))
    with start(cut.folder, setting, resume=True) as train:
        refusal = train.finish()
    assert (learned(cut.run), find_checkpoint(RunFolder(cut.run))) == before, refusal
    assert verify(cut.run) == []
    return refusal


def digests(run):
    """What was published after each step: once more after each start."""
    found = {}
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        for step, digest in ledger.execute("SELECT step, digest FROM version"):
            found.setdefault(step, set()).add(digest)
    return found


def learned(run):
    """What its steps did, without their times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[row[name] for name in LEARNED] for row in rows]


def start(folder, *settings, resume=False):
    """One replica that has room for a batch, and a reward whose sum depends on the order of its terms."""
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text("def score(request): return (len(request.response_ids) % 7) / 7")
    one = ("schedule=sync", *ALONE, "eval.sets={}", f"steps={STEPS}")
    return TrainProcess(folder, *one, f"reward.use=[{folder / 'reward.py'}:score]", *settings, resume=resume)


def test_under_sync_a_resumed_run_continues_bit_by_bit_whatever_was_tried_meanwhile(runs):
    whole, resumed, _ = runs
    assert learned(resumed) == learned(whole)
    assert digests(resumed) == digests(whole)
    assert len({digest for (digest,) in digests(whole).values()}) == STEPS + 1, "every step taught something"
    assert verify(resumed) == []


def test_sync_is_on_policy(runs):
    whole, _, _ = runs
    consumed = listing(whole, Filters(status=Status.CONSUMED, kind=Kind.TRAIN))
    assert {row.staleness for row in consumed} == {0}


def test_going_on_with_another_model_is_refused_in_one_line(runs):
    code, output = runs[2][0]
    assert code == 2
    (line,) = [line for line in output.splitlines() if line.startswith("laminar:")]
    assert re.search(r"/checkpoints/step-\d+-1.0: was saved of a qwen3 of 2", line)
    assert "set model.path, its warm start and learner.lora as they were" in line


def test_going_on_with_another_seed_is_refused_in_one_line(runs):
    code, output = runs[2][1]
    assert code == 2
    (line,) = [line for line in output.splitlines() if line.startswith("laminar:")]
    assert re.search("^laminar: seed=9: .* began with 0, .*; leave the setting out, or start a new run$", line)
