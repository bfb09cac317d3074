"""A whole run that trains adapters: their versions alone travel, and a run that was killed goes on with them."""

import json
import sqlite3
from contextlib import closing, suppress

import psutil
import pytest

from laminar_lab.audit.queries import Filters, accounting, listing
from laminar_lab.audit.verify import verify
from laminar_py.records.trajectory import Kind
from tests.runs.runs import TrainProcess, wait_until_gone


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def version_bytes(run):
    """Of all versions published."""
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        return [row[0] for row in ledger.execute("SELECT num_bytes FROM version")]


@pytest.mark.slow
def test_a_run_of_adapters_on_two_ranks_that_was_killed_resumes_and_keeps_the_laws(tmp_path):
    """The base is the warm start's result and the reference of the KL term; engines merge each version with it.

    Every process is killed at once, and responses go on under new weights.
    """
    (tmp_path / "reward.py").write_text("def score(request): return float(len(request.response_ids) % 3)")
    settings = [
        "relay.nodes=1",
        "steps=6",
        "learner.lora.rank=4",
        "learner.lr=3e-3",
        "learner.world_size=2",
        "rollout.on_new_weights=resume",
        "rollout.partial_interval_s=0.1",
        "rollout.sampling.max_new_tokens=200",  # longer than a learner step
        "algorithm.kl_coef=0.1",
        f"reward.use=[{tmp_path / 'reward.py'}:score]",
    ]
    with TrainProcess(tmp_path, *settings) as train:
        train.wait_for_step(3)
        family = train.family()
        for process in family:
            with suppress(psutil.NoSuchProcess):  # it went with another
                process.kill()
        train.process.wait()
        assert accounting(train.run).balanced
    with TrainProcess(tmp_path, *settings, resume=True) as again:
        code, output = again.finish()
        assert code == 0, output
        assert wait_until_gone(family) == []
    assert verify(again.run) == []
    training = listing(
        again.run, Filters(kind=Kind.TRAIN)
    )  # all of it: on a busy machine none may be consumed yet
    assert any(row.oldest_version != row.newest_version for row in training), "no response spans versions"
    rows = metrics_of(again.run)
    assert rows[-1]["step"] == 6
    assert max(row["mismatch_max"] or 0.0 for row in rows) < 1e-3
    assert rows[-1]["kl_reference_k3"] > 0, "the policy has left its base"
    (base,) = (tmp_path / "warm").glob("*/model.safetensors")
    assert max(version_bytes(again.run)) < base.stat().st_size / 5
