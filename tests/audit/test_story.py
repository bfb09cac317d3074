"""One trajectory's life, as the audit tells it."""

from laminar_lab.audit.samples import read_sample
from laminar_lab.audit.stories import ReplicaSpan, describe_events
from laminar_py.records.events import Cut, Dropped, Interrupted, Restamped, StreamLost
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason
from tests.ledger.runs import begin, consume, finish, issue, make_ready, open_ledger, run_to


async def test_a_story_tells_a_trajectory_from_issue_to_use(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        issue(ledger, "g0.0")
        make_ready(ledger, "g1.0", index=1)
        run_to(ledger, "g0.0", [(0, 0, 3), (1, 3, 5)], replica=2)
        ledger.append(Cut("g0.0", "tokens", 5))
        finish(ledger, "g0.0", [(0, 0, 3), (1, 3, 5)])
        ledger.append_all(consume(1, 2, "g0.0", staleness=2))
    told = read_sample(tmp_path, "g0.0").story
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
        ledger.append(StreamLost("g0.0", 0, 5))
        ledger.append(Restamped("g0.0", spans))
        await ledger.commit()
        told = read_sample(tmp_path, "g0.0").story
    assert [type(item.event).__name__ for item in told.events] == ["Issued", "Assigned", "StreamLost", "Restamped"]
    assert told.spans == [
        ReplicaSpan(version=0, replica=0, start=0, end=2),
        ReplicaSpan(version=1, replica=0, start=2, end=5, kv_version=0),
    ]
    assert describe_events(told)[:2] == [
        "sampling mask: 5 tokens, each of 2.0 on average",
        "routed experts: positions 0 to 7, 3 layers, 2 in each",
    ]


async def test_a_story_tells_a_move_and_who_made_which_tokens(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        make_ready(ledger, "g0.1")
        ledger.append(Dropped("g0.1", DropReason.NO_SIGNAL))
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 3)], replica=2)
        ledger.append(Interrupted(trajectory_id="g0.0", epoch=1, length=3, reason="repacked"))
        run_to(ledger, "g0.0", [(0, 3, 5)], replica=1, epoch=2, start=3)
        finish(ledger, "g0.0", [(0, 0, 5)], epoch=2)
        ledger.append_all(consume(1, 2, "g0.0", staleness=2))
    told = read_sample(tmp_path, "g0.0").story
    assert told.spans == [
        ReplicaSpan(version=0, replica=2, start=0, end=3),
        ReplicaSpan(version=0, replica=1, start=3, end=5),
    ]
    lines = describe_events(told)
    assert "consumed     step 1  version 2  staleness 2  weight 1" in lines[-1]
    assert any("interrupted" in line and "reason repacked" in line for line in lines)
    assert any("assigned" in line and "replica 1  epoch 2  length 3" in line for line in lines)
