"""What the audit answers about a run."""

import pytest

from laminar_lab.audit.queries import Filters, accounting, listing, staleness_histogram
from laminar_py.ledger.rows import KindAccount
from laminar_py.records.events import Dropped
from laminar_py.records.trajectory import DropReason, Kind, Status
from tests.ledger.runs import begin, consume, issue, make_ready, open_ledger


async def a_run(run):
    async with open_ledger(run) as ledger:
        begin(ledger, versions=range(6))
        for index, id in enumerate(("g0.0", "g0.1", "g1.0")):
            make_ready(ledger, id, index=index)
        make_ready(ledger, "e0.0", kind=Kind.EVAL)
        ledger.append(consume(-1, 0, "e0.0")[1])
        ledger.append_all(consume(1, 1, "g0.0", staleness=1))
        ledger.append_all(consume(2, 4, "g0.1", staleness=4))
        ledger.append(Dropped("g1.0", DropReason.STALE, "staleness 5"))
        issue(ledger, "g2.0", index=2)


async def test_accounting_keeps_evaluations_apart(tmp_path):
    await a_run(tmp_path)
    counted = accounting(tmp_path)
    assert counted.train == KindAccount(issued=4, consumed=2, dropped={DropReason.STALE: 1}, live=1)
    assert counted.eval == KindAccount(issued=1, consumed=1, dropped={}, live=0)


async def test_staleness_is_counted_for_what_was_trained_on(tmp_path):
    await a_run(tmp_path)
    assert staleness_histogram(tmp_path) == {1: 1, 4: 1}


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        (Filters(), ["g0.0", "g0.1", "g1.0", "e0.0", "g2.0"]),
        (Filters(status=Status.QUEUED), ["g2.0"]),
        (Filters(reason=DropReason.STALE), ["g1.0"]),
        (Filters(staleness=">3"), ["g0.1"]),
        (Filters(staleness="<= 1", kind=Kind.TRAIN), ["g0.0"]),
        (Filters(staleness="4"), ["g0.1"]),
        (Filters(group="g0", status=Status.CONSUMED), ["g0.0", "g0.1"]),
        (Filters(group="g9"), []),
        (Filters(step="2"), ["g0.1"]),
        (Filters(step=">0"), ["g0.0", "g0.1"]),
        (Filters(replica=0, kind=Kind.EVAL), ["e0.0"]),
        (Filters(version=0, status=Status.CONSUMED, kind=Kind.TRAIN), ["g0.0", "g0.1"]),
        (Filters(version=1), []),
        (Filters(reward=">0.5", status=Status.DROPPED), ["g1.0"]),
        (Filters(reward="!=1"), []),
        (Filters(length="<5"), ["g2.0"]),
        (Filters(prompt="p1"), ["g0.1"]),
    ],
)
async def test_listing_passes_what_meets_all_filters(tmp_path, filters, ids):
    await a_run(tmp_path)
    assert [row.id for row in listing(tmp_path, filters)] == ids
