"""Storage of a replica's responses: what is lost is told, what cannot be written costs one replica alone."""

import errno
from types import SimpleNamespace

import pytest

from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.salvage import RecordedProgress, salvage
from laminar_py.ledger.segments.writer import JOURNAL, Journal
from laminar_py.records.engine import EngineLostError, StoreFullError
from laminar_py.records.pieces import Piece, TokensRef
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason
from laminar_py.rollout.storing import LEAST_FREE, SegmentStore
from tests.builders import make_ref
from tests.rollout.test_replica import assignment, folders, serving  # noqa: F401 (`folders` is a fixture)


def full(pieces):
    if pieces:
        raise OSError(errno.ENOSPC, "No space left on device")


def salvaged(story, **running):
    """What the journals of a replica have of these: known tokens by trajectory."""
    known = {name: RecordedProgress(1, length) for name, length in running.items()}
    found = salvage(story.folder, story.label, known).found
    return {one.trajectory_id: one for one in found}


async def noted(story, name):
    """Until the journal has something of it."""
    await story.until(lambda s: s.replica._streams.running[name].journaled)


@pytest.mark.parametrize("end", [3, 5], ids=["its segment is gone", "a piece is missing"])
async def test_a_response_that_cannot_be_read_is_handed_back_as_lost_and_costs_nobody_else(folders, end):  # noqa: F811
    async with serving(folders) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        (begun,) = story.begun("gone", (7, 8, 9))
        at = make_ref("replica-9.gone") if end == 3 else begun.at
        story.ids["gone"] = [7] * end
        story.replica.start_assignments([assignment("gone", tokens=[TokensRef(0, end, at)]), assignment("a")])
        await story.until(lambda s: "a" in s.ended and "gone" in s.missing)
        assert ("replica-9.gone" if end == 3 else "3 tokens of 5") in story.missing["gone"]
        assert "gone" not in story.ended
        assert not story.replica._streams.running


async def test_what_runs_is_told_to_nobody_and_is_in_the_journal_until_it_leaves(folders):  # noqa: F811
    async with serving(folders, reports_partials=False) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=2500), assignment("b", length=4000)])
        await noted(story, "a")
        assert not story.ids
        assert story.generated > 0
        found = salvaged(story, a=0, b=0)["a"]
        assert (found.tokens.start, found.spans) == (0, (Span(0, 0, found.tokens.end),))
        await story.until(lambda s: "a" in s.ended)
        assert story.ids_of(found.tokens) == story.ids["a"][: found.tokens.end]
        assert "a" not in salvaged(story, a=len(story.ids["a"]))
        ((_, held),) = story.replica._store._journal._files
        assert held <= {"b"}


async def test_a_replica_that_cannot_write_any_more_is_lost_and_another_takes_what_it_had(folders):  # noqa: F811
    async with serving(folders, reports_partials=False) as (story, _), serving(folders) as (other, _):
        await story.until(lambda s: s.admissible > 0)
        await other.until(lambda s: s.admissible > 0)
        other.replica.start_assignments([assignment("b", length=1500)])
        story.replica.start_assignments([assignment("a", length=2500, temperature=0.0)])
        await noted(story, "a")
        kept = salvaged(story, a=0)["a"].tokens
        story.replica._store._segment.write_all = full
        with pytest.raises(
            EngineLostError, match=r"^segments=.*: cannot be written \(No space left on device\); make"
        ):
            await story.until(lambda s: False)
        assert "a" not in story.ended
        assert not story.task.done()
        other.ids["a"] = other.ids_of(kept)
        other.replica.start_assignments([assignment("a", length=2500, tokens=[kept], temperature=0.0)])
        await other.until(lambda s: {"a", "b"} <= s.ended.keys())
        assert other.ended["a"].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


async def test_a_journal_that_cannot_be_written_loses_the_replica_as_well(folders):  # noqa: F811
    async with serving(folders, reports_partials=False) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        story.replica._store._journal.write = full
        story.replica.start_assignments([assignment("a", length=4000)])
        with pytest.raises(EngineLostError, match="make room"):
            await story.until(lambda s: False)
        assert story.ids["a"], "its last report has what it gave"


def test_a_store_without_room_is_refused_when_it_is_made(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StoreFullError, match="make room"):
        SegmentStore(file, "replica-0", PayloadReader(file))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=LEAST_FREE - 1))
    with pytest.raises(StoreFullError, match="are free there; make room"):
        SegmentStore(tmp_path / "segments", "replica-0", PayloadReader(tmp_path))


def piece(name):
    return Piece(trajectory_id=name, epoch=1, start=0, spans=(Span(0, 0, 1),), ids=bytes(4), logprobs=bytes(4))


def test_a_journal_forgets_what_left_and_is_deleted_once_nothing_in_it_counts(tmp_path):
    journal = Journal(tmp_path, "replica-0", roll_bytes=1)
    journal.write([piece("a"), piece("b")])
    journal.write([piece("b")])  # to another file
    assert len(list(tmp_path.glob(f"*{JOURNAL}"))) == 2
    journal.forget("a")
    assert len(list(tmp_path.glob(f"*{JOURNAL}"))) == 2, "b still runs"
    journal.forget("b")
    assert len(list(tmp_path.glob(f"*{JOURNAL}"))) == 1, "the present one stays open"
