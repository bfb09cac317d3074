"""A run whose fleet changes while it goes on: emulated replicas, and all else the real thing."""

import json
import signal
import subprocess
import time

from laminar_py.audit.queries import accounting
from laminar_py.audit.verify import verify
from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import decode_event
from tests.runs.runs import LAMINAR, REPO, TrainProcess, forget_versions

CONFIG = REPO / "configs/emulation/repack.yaml"
SETTINGS = (
    "warm_start=null",  # of the small settings, which are for the quickstart
    "eval.sets={}",
    "steps=10000",
    "rollout.replicas=2",
    "rollout.max_batch=8",
    "rollout.batch_per_replica=16",
    "rollout.prompts_per_step=8",  # 32 trajectories: the batches of two replicas
    "rollout.max_len=1424",
    "rollout.sampling.max_new_tokens=1024",
    "rollout.partial_interval_s=0.5",
    "emulation.median_tokens=300",
    "emulation.compression=4",
    "emulation.learner_devices=64",  # generation bounds the run
    "learner.checkpoint_every=1000",
)


def scale(run, *fleet, code=0):
    """Words of `laminar scale`."""
    done = subprocess.run(
        [LAMINAR, "scale", str(run), *fleet], cwd=REPO, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def events_of(run, *kinds):
    """Seconds and event, of these kinds."""
    marks = ", ".join("?" * len(kinds))
    with reading(run) as connection:
        rows = connection.execute(f"SELECT wall, body FROM event WHERE kind IN ({marks}) ORDER BY seq", kinds)
        return [(wall, decode_event(body)) for wall, body in rows]


def fleet_rows(run):
    return [json.loads(line) for line in (run / "fleet.jsonl").read_text().splitlines() if line.endswith("}")]


def rate(rows):
    """Running trajectories on average, whatever replicas had them."""
    return sum(sum(row["running"]) for row in rows) / len(rows)


def left(run):
    return {event.replica for _, event in events_of(run, "replicaleft")}


def test_a_run_goes_on_with_more_replicas_and_with_fewer(tmp_path):
    with TrainProcess(tmp_path, *SETTINGS, config=CONFIG) as train:
        train.wait_for_step(2)
        assert "2 -> 6" in scale(train.run, "replicas=6")
        train.wait_until(
            lambda: {0, 1, 2, 3, 4, 5} <= {e.replica for _, e in events_of(train.run, "versionloaded")}
        )
        time.sleep(8)
        assert "6 -> 3" in scale(train.run, "replicas=3")
        train.wait_until(lambda: len(left(train.run)) == 3)
        time.sleep(5)
        train.send(signal.SIGINT)
        code, output = train.finish()
    forget_versions(train.run)
    assert code == 130, output
    assert verify(train.run) == []
    assert accounting(train.run).balanced
    assert not events_of(train.run, "partdied")
