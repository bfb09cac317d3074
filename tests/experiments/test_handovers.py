"""How long trajectories of dead replicas wait for another one."""

import pytest

from experiments.kill_test.handovers import handovers
from laminar_py.records.events import Assigned, Dropped, Interrupted
from laminar_py.records.trajectory import DropReason
from tests.ledger.runs import begin, issue, open_ledger, run_to


async def test_a_handover_keeps_what_was_generated_and_counts_from_the_detection(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 5)], replica=1)
        ledger.append(Interrupted(trajectory_id="g0.0", epoch=1, length=5, reason="replica_crashed"))
        ledger.append(Assigned("g0.0", 0, 2, 5))
    (found,) = handovers(tmp_path)
    assert (found.trajectory_id, found.source, found.target, found.length) == ("g0.0", 1, 0, 5)
    assert found.waited_s >= 0


async def test_what_no_replica_takes_up_has_no_target(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 5)])
        ledger.append(Interrupted(trajectory_id="g0.0", epoch=1, length=5, reason="replica_crashed"))
        ledger.append(Dropped("g0.0", DropReason.VERSION_LOST, "version 0"))
    (found,) = handovers(tmp_path)
    assert (found.target, found.waited_s) == (None, None)


@pytest.mark.parametrize("reason", ["new_weights", "controller_crashed", "returned"])
async def test_only_deaths_of_replicas_count(tmp_path, reason):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 5)])
        ledger.append(Interrupted(trajectory_id="g0.0", epoch=1, length=5, reason=reason))
        ledger.append(Assigned("g0.0", 1, 2, 5))
    assert handovers(tmp_path) == []
