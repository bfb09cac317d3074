"""What the audit answers about a run."""

import pytest

from laminar_py.audit.queries import Filters, accounting, listing, staleness_histogram, story, tell_response
from laminar_py.events import Cut, Dropped, Restamped, StreamCut
from laminar_py.store.rows import KindAccount
from laminar_py.types import DropReason, Kind, Span, Status
from tests.store.runs import begin, consume, finish, issue, make_ready, open_ledger, run_to


async def a_run(run):
    async with open_ledger(run) as ledger:
        begin(ledger, versions=range(6))
        for index, id in enumerate(("g0.0", "g0.1", "g1.0")):
            make_ready(ledger, id, index=index)
        make_ready(ledger, "e0.0", kind=Kind.EVAL)
        ledger.append(consume(-1, 0, "e0.0")[1])
        ledger.append_all(consume(1, 1, "g0.0"))
        ledger.append_all(consume(2, 4, "g0.1"))
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
    ],
)
async def test_listing_passes_what_meets_all_filters(tmp_path, filters, ids):
    await a_run(tmp_path)
    assert [row.id for row in listing(tmp_path, filters)] == ids


async def test_a_story_tells_a_trajectory_from_issue_to_use(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        issue(ledger, "g0.0")
        make_ready(ledger, "g1.0", index=1)
        run_to(ledger, "g0.0", [(0, 0, 3), (1, 3, 5)], replica=2)
        ledger.append(Cut("g0.0", "tokens", 5))
        finish(ledger, "g0.0", [(0, 0, 3), (1, 3, 5)])
        ledger.append_all(consume(1, 2, "g0.0"))
    told = story(tmp_path, "g0.0")
    kinds = [type(item.event).__name__ for item in told.events]
    assert kinds == ["Issued", "Assigned", "Cut", "Finished", "Scored", "Ready", "Consumed"]
    times = [item.since_s for item in told.events]
    assert times[0] == 0
    assert times == sorted(times)
    assert told.response.spans == (Span(0, 0, 3), Span(1, 3, 5))
    assert (told.prompt, told.answer) == ("prompt 0", "4")
    assert (told.row.replica, told.row.step, told.row.staleness, told.row.cap) == (2, 1, 2, "tokens")


async def test_a_story_tells_what_was_recorded_and_corrected(tmp_path):
    spans = (Span(0, 0, 2), Span(1, 2, 5, 0))
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 5)], recorded=True)
        ledger.append(StreamCut("g0.0", 0, 5))
        ledger.append(Restamped("g0.0", spans))
        await ledger.commit()
        told = story(tmp_path, "g0.0")
    assert [type(item.event).__name__ for item in told.events] == ["Issued", "Assigned", "StreamCut", "Restamped"]
    assert tell_response(told.response) == [
        "tokens 0 to 2: version 0",
        "tokens 2 to 5: version 1, on a KV cache from version 0 on",
        "sampling mask: 5 tokens, each of 2.0 on average",
        "routed experts: positions 0 to 7, 3 layers, 2 in each",
    ]


async def test_a_bad_question_is_answered_in_one_line(tmp_path):
    await a_run(tmp_path)
    with pytest.raises(ValueError, match=r"trajectory=g9\.9: not in"):
        story(tmp_path, "g9.9")
    with pytest.raises(ValueError, match="staleness=~3: not a comparison"):
        list(listing(tmp_path, Filters(staleness="~3")))
