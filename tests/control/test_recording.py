"""What is kept of a trajectory is what its engines did, wherever its streams ended and however they went on."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import segments_path
from laminar_py.ledger.recovery import recover
from laminar_py.records.events import Finished, Interrupted, Restamped, StreamLost
from laminar_py.records.replica import Progress
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import InterruptReason
from tests.builders import make_experts, make_mask
from tests.control.streams import ID, PROMPT, Streams, token_ids
from tests.depth import examples
from tests.ledger.runs import begin, open_ledger


def assert_whole(response, length):
    """Tokens, masks and experts are those that the engines gave."""
    mask = make_mask(token_ids(0, length))
    assert response.ids.tolist() == token_ids(0, length).tolist()
    assert response.sampling_mask.counts.tolist() == mask.counts.tolist()
    assert response.sampling_mask.ids.tolist() == mask.ids.tolist()
    assert response.routed_experts == make_experts(0, PROMPT + length - 1)


def events_of(streams, *kinds):
    return [event for event in streams.fleet.log.events if isinstance(event, kinds)]


async def test_masks_and_experts_join_across_abort_and_resume(tmp_path):
    streams = Streams(tmp_path)
    await streams.play([4, 4, 4], end="new_weights", report_after=2)
    await streams.play([5], end="abort")
    await streams.play([5, 6])
    assert [request.routed for request in streams.requests] == [0, 5, 6]
    (trajectory,) = streams.fleet.unscored
    assert_whole(streams.response(), 6)
    assert trajectory.spans == (Span(4, 0, 3), Span(5, 3, 5), Span(6, 5, 6))


async def test_what_a_broken_stream_left_out_comes_with_the_next(tmp_path):
    streams = Streams(tmp_path)
    await streams.play([4, 4], end="new_weights")
    await streams.play([5, 5, 5], end="cut")
    assert events_of(streams, StreamLost, Interrupted)[-2:] == [
        StreamLost(ID, 0, 5),
        Interrupted(trajectory_id=ID, epoch=1, length=5, reason="replica_crashed"),
    ]
    assert max(one.routed for one in streams.trajectory.tokens) == PROMPT + 2 - 1
    await streams.play([5])
    assert [request.routed for request in streams.requests] == [0, 4, 4]
    assert_whole(streams.response(), 6)


async def test_a_stream_that_broke_with_nothing_to_report_is_on_record_too(tmp_path):
    streams = Streams(tmp_path)
    await streams.play([4, 4], end="new_weights")
    cut = [
        Progress(trajectory_id=name, epoch=1, start=2, broken=InterruptReason.ENGINE_LOST) for name in (ID, "g9.9")
    ]
    await streams.fleet.report(0, progress=cut)
    assert events_of(streams, StreamLost) == [StreamLost(ID, 0, 2)]


async def test_experts_of_a_stream_that_broke_for_good_are_unknown(tmp_path):
    streams = Streams(tmp_path)
    await streams.play([4, 4], end="cut")
    await streams.play([], recorded=False)  # ended by a cap before it went on
    assert len(streams.fleet.unscored) == 1
    assert streams.response().routed_experts is None
    assert len(streams.response().sampling_mask.counts) == 2


async def test_a_change_of_version_stands_where_the_engines_last_word_puts_it(tmp_path):
    streams = Streams(tmp_path)
    await streams.play([4, 4], end="new_weights")
    await streams.play([5, 5, 6, 6], sure=[5, (6, 5), (6, 5), (6, 5)], report_after=3)
    spans = (Span(4, 0, 2), Span(5, 2, 3), Span(6, 3, 6, 5))
    assert events_of(streams, Restamped) == [Restamped(ID, spans)]
    assert events_of(streams, Finished)[0].spans == streams.fleet.unscored[0].spans == spans


async def test_a_last_word_that_changes_nothing_is_no_event(tmp_path):
    streams = Streams(tmp_path)
    await streams.play([4, 4, 5], sure=[4, 4, 5], report_after=2)
    assert not events_of(streams, Restamped)


async def test_a_last_word_on_tokens_that_were_not_stored_yet_is_no_event(tmp_path):
    streams = Streams(tmp_path)
    await streams.play([4, 4, 5], sure=[4, 5, 5])
    assert not events_of(streams, Restamped)
    assert streams.fleet.unscored[0].spans == (Span(4, 0, 1), Span(5, 1, 3))


LABEL = st.sampled_from([4, 5, (5, 4)])


@st.composite
def histories(draw):
    """Streams as (said, sure, end, report_after, note_after), the last of which stops."""
    streams = []
    for last in [*draw(st.lists(st.just(False), max_size=4)), True]:
        said = draw(st.lists(LABEL, min_size=int(last), max_size=4))
        sure = draw(st.none() | st.lists(LABEL, min_size=len(said), max_size=len(said)))
        end = "stop" if last else draw(st.sampled_from(["abort", "new_weights", "cut", "killed"]))
        streams.append((said, sure, end, draw(st.integers(0, 4)), draw(st.integers(0, 4))))
    return streams


@settings(max_examples=examples(40), deadline=None)
@given(histories())
def test_memory_and_ledger_keep_what_the_engines_did_whatever_becomes_of_the_streams(history):
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(history, Path(folder)))


async def play(history, run):
    async with open_ledger(run) as ledger:
        begin(ledger, versions=(4, 5))
        streams = Streams(segments_path(run), recorder=ledger)
        for said, sure, end, report_after, note_after in history:
            await streams.play(said, sure=sure, end=end, report_after=report_after, note_after=note_after)
            await ledger.commit()
            (live,) = recover(run).live
            assert live.token_spans == streams.spans
            assert verify(run) == []
        length = len(streams.known)
        assert live.tokens == streams.trajectory.tokens
        assert_whole(streams.response(), length)
        assert streams.fleet.unscored[0].spans == streams.spans
