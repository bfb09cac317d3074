"""A run that is killed or stopped in the middle of an evaluation goes on with it."""

import signal

import pytest

from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import reading
from laminar_py.ledger.evaluations import read_evaluations
from tests.runs.runs import ALONE, SMALL, TrainProcess

SAMPLES = 12
SLOW_REWARD = """
import time

def score(request):
    time.sleep(0.02)  # so that a kill comes before the end of a pass, on any machine
    return 0
"""
PASSES = ["e0-heldout", "e1-heldout", "e2-heldout"]
SETTINGS = (
    *ALONE,
    "learner.checkpoint_every=1",
    "eval.every_steps=2",
    SMALL[-1].replace("heldout=", "heldout={path: ") + f", samples: {SAMPLES}, temperature: 1}}",
)


def answered(run, pass_id, step):
    """Answers of a pass on record, once weights of that step are in a checkpoint."""
    if not (run / ("metrics.jsonl" if step else "ledger.sqlite")).is_file():
        return 0
    with reading(run) as connection:
        (saved,) = connection.execute("SELECT coalesce(max(step), 0) FROM checkpoint").fetchone()
        query = "SELECT count(*) FROM trajectory WHERE group_id = ? AND status = 'consumed'"
        (found,) = connection.execute(query, (pass_id,)).fetchone()
    return found if saved >= step else 0


@pytest.mark.parametrize(
    ("step", "ends", "code"),
    [
        pytest.param(0, signal.SIGINT, 130, marks=pytest.mark.slow),
        (2, signal.SIGKILL, -signal.SIGKILL),
        pytest.param(4, signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
    ids=["stopped-at-the-first", "killed", "stopped-at-the-last"],
)
def test_a_pass_that_was_interrupted_is_finished_by_the_resumed_run(tmp_path, step, ends, code):
    open_pass = f"e{step // 2}-heldout"
    reward = tmp_path / "slow.py"
    reward.write_text(SLOW_REWARD)
    settings = (*SETTINGS, f"reward.use=[{reward}:score]")
    with TrainProcess(tmp_path, *settings) as process:
        process.wait_until(lambda: answered(process.run, open_pass, step))
        process.send(ends)
        ended, output = process.finish()
        run = process.run
    assert ended == code, output
    assert [one.pass_id for one in read_evaluations(run)] == PASSES[: step // 2]
    with TrainProcess(tmp_path, *settings, resume=True) as process:
        output = process.end_with(0)
    found = read_evaluations(run)
    assert [one.pass_id for one in found] == PASSES
    assert found[1].step <= 2, "under what its replica served then"
    assert (found[0].step, found[2].step) == (0, 4)
    assert found[1].figures.problems == 8
    with reading(run) as connection:
        count = "SELECT count(*) FROM event WHERE kind = 'issued' AND subject GLOB ?"
        assert connection.execute(count, (f"{open_pass}.*",)).fetchone()[0] == SAMPLES * 8, (
            "nothing was issued twice"
        )
    assert verify(run) == []
