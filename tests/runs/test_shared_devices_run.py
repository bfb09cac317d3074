"""A run whose learner and replicas take turns: parts die in any turn, and everything is in order at the end."""

import os
import signal
from itertools import pairwise

import msgspec
import pytest

from laminar_py.ledger.database import reading
from tests.runs.runs import TrainProcess, assert_laws

SHARED = ("cluster.share=true", "steps=8", "learner.checkpoint_every=1")


def pid_of(run, part):
    """The newest process of a part."""
    with reading(run) as connection:
        query = "SELECT body FROM event WHERE kind = 'partstarted' AND subject = ? ORDER BY seq DESC LIMIT 1"
        ((body,),) = connection.execute(query, (part,))
    return msgspec.json.decode(body)["pid"]


def holders(run):
    with reading(run) as connection:
        rows = connection.execute("SELECT body FROM event WHERE kind = 'leased' ORDER BY seq").fetchall()
    return [msgspec.json.decode(body)["holder"] for (body,) in rows]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["keep", "release"])
def test_parts_that_die_in_any_turn_cost_nothing_but_time(tmp_path, cache):
    with TrainProcess(tmp_path, *SHARED, f"cluster.lease.cache={cache}") as run:
        for step, part in enumerate(("replica-0", "learner-0", "replica-1"), 1):
            run.wait_for_step(step)
            os.kill(pid_of(run.run, part), signal.SIGKILL)
        run.end_with(0)
    assert_laws(run.run)
    turns = holders(run.run)
    assert turns[0] == "replicas"
    assert all(one != other for one, other in pairwise(turns)), turns
    assert turns.count("learner") >= 3


@pytest.mark.slow
def test_a_controller_that_dies_in_a_turn_is_resumed(tmp_path):
    with TrainProcess(tmp_path, *SHARED) as run:
        run.wait_for_step(2)
        run.send(signal.SIGKILL)
        run.process.wait()
    with TrainProcess(tmp_path, *SHARED, resume=True) as again:
        again.end_with(0)
    assert_laws(run.run)
