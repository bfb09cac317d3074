"""A run that is killed in the middle of an evaluation goes on with it."""

import signal

from laminar_py.audit.verify import verify
from laminar_py.ledger.database import reading
from laminar_py.ledger.evaluations import read_evaluations
from tests.runs.runs import ALONE, PATIENCE_S, SMALL, TrainProcess, forget_versions

SAMPLES = 24
SETTINGS = (
    *ALONE,
    "learner.checkpoint_every=1",
    "rollout.max_batch=4",  # slow, so that a kill comes before the end
    "rollout.batch_per_replica=4",
    "eval.every_steps=2",
    SMALL[-1].replace("heldout=", "heldout={path: ") + f", samples: {SAMPLES}, temperature: 1}}",
)


def answered(run, pass_id):
    """Answers of a pass on record, once its weights are in a checkpoint."""
    if not (run / "metrics.jsonl").is_file():
        return 0
    with reading(run) as connection:
        (saved,) = connection.execute("SELECT coalesce(max(step), 0) FROM checkpoint").fetchone()
        query = "SELECT count(*) FROM trajectory WHERE group_id = ? AND status = 'consumed'"
        (found,) = connection.execute(query, (pass_id,)).fetchone()
    return found if saved >= 2 else 0


def test_a_pass_that_a_kill_interrupted_is_finished_by_the_resumed_run(tmp_path):
    with TrainProcess(tmp_path, *SETTINGS) as process:
        before = process.wait_until(lambda: answered(process.run, "e1-heldout"))
        process.send(signal.SIGKILL)
        process.process.wait(PATIENCE_S)
        run = process.run
    assert before < SAMPLES * 8, "it was killed before its end"
    assert [one.step for one in read_evaluations(run)] == [0]
    with TrainProcess(tmp_path, *SETTINGS, resume=True) as process:
        code, output = process.finish()
    forget_versions(run)
    assert code == 0, output
    found = read_evaluations(run)
    assert [(one.pass_id, one.step) for one in found] == [("e0-heldout", 0), ("e1-heldout", 2), ("e2-heldout", 4)]
    assert found[1].figures.problems == 8
    with reading(run) as connection:
        count = "SELECT count(*) FROM event WHERE kind = 'issued' AND subject LIKE 'e1-%'"
        assert connection.execute(count).fetchone()[0] == SAMPLES * 8, "nothing was issued twice"
    assert verify(run) == []
