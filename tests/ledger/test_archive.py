"""Settled responses move to Parquet and stay findable."""

import os

import numpy as np
import pytest
from laminar_py.ledger.payload import stored_recordings

from laminar_py.audit.export import export
from laminar_py.audit.story import story
from laminar_py.audit.verify import verify
from laminar_py.ledger import archive
from laminar_py.ledger.archive import archive_files, file_pieces, write_archive
from laminar_py.ledger.database import LEDGER_NAME, LedgerError, reading
from laminar_py.ledger.recovery import recover
from laminar_py.records.events import Assigned, Dropped, Restamped
from laminar_py.records.recordings import SamplingMask, pack_mask
from laminar_py.records.trajectory import DropReason, Span
from tests.builders import make_experts
from tests.ledger.runs import begin, checkpoint, consume, finish, issue, make_ready, open_ledger, run_to, tokens
from tests.ledger.scans import scans_of_the_log, statements


async def settle(ledger):
    """Consumed before and after a checkpoint, dropped, and live."""
    begin(ledger, versions=(0, 1))
    for index, id in enumerate(("g0.0", "g1.0", "g2.0")):
        make_ready(ledger, id, spans=((0, 0, 3), (1, 3, 7)), index=index)
    issue(ledger, "g3.0", index=3)
    run_to(ledger, "g3.0", [(0, 0, 4)])
    ledger.append(Dropped("g3.0", DropReason.GROUP_DEADLINE))
    ledger.append_all(consume(1, 1, "g0.0"))
    ledger.append(checkpoint(1, 1))
    ledger.append_all(consume(2, 1, "g1.0"))


async def test_only_what_no_rollback_can_need_is_moved_and_all_is_found(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await settle(ledger)
        assert await ledger.archive(1) == 2
        assert await ledger.archive(1) == 0
    with reading(tmp_path) as connection:
        assert connection.execute("SELECT count(*) FROM segment").fetchone() == (4,)
    for id, length in (("g0.0", 7), ("g1.0", 7), ("g2.0", 7), ("g3.0", 4)):
        response = story(tmp_path, id).response
        ids, logprobs = tokens(id, 0, length)
        assert (response.ids.tolist(), response.logprobs.tolist()) == (ids.tolist(), logprobs.tolist())
    assert verify(tmp_path) == []


async def test_a_crash_between_copy_and_deletion_does_no_harm(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await settle(ledger)
        await ledger.commit()
        assert len(write_archive(tmp_path, 1).trajectories) == 2
        assert verify(tmp_path) == []
        ledger.append_all(consume(3, 1, "g2.0"))
        await ledger.archive(1)
    assert sum(len(list(file_pieces(path))) for path in archive_files(tmp_path)) == 6
    assert len(story(tmp_path, "g0.0").response.ids) == 7
    assert verify(tmp_path) == []


async def test_a_lost_archive_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "_ROW_GROUP_BYTES", 20)
    async with open_ledger(tmp_path) as ledger:
        await settle(ledger)
        await ledger.archive(1)
    assert verify(tmp_path) == []
    (file,) = (tmp_path / "archive").iterdir()
    os.remove(file)
    assert {finding.subject for finding in verify(tmp_path)} == {"g0.0", "g3.0", f"archive/{file.name}"}


async def test_masks_experts_and_corrected_spans_are_in_the_archive_too(tmp_path):
    spans = (Span(0, 0, 2), Span(1, 2, 7, 0))
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        issue(ledger, "g0.0")
        run_to(ledger, "g0.0", [(0, 0, 3), (1, 3, 7)], recorded=True)
        ledger.append(Restamped("g0.0", spans))
        finish(ledger, "g0.0", [(0, 0, 2), (1, 2, 7, 0)])
        ledger.append_all(consume(1, 1, "g0.0"))
        ledger.append(checkpoint(1, 1))
        await ledger.commit()
        stored = story(tmp_path, "g0.0").response
        with reading(tmp_path) as connection:
            found = stored_recordings(connection, ["g0.0", "g9.9"])
            assert list(found) == ["g0.0"]
            assert pack_mask(found["g0.0"].sampling_mask) == pack_mask(stored.sampling_mask)
            assert found["g0.0"].routed_experts == make_experts(0, 9)
        assert await ledger.archive(1) == 1
    moved = story(tmp_path, "g0.0").response
    assert moved.spans == spans
    assert pack_mask(moved.sampling_mask) == pack_mask(stored.sampling_mask)
    assert moved.routed_experts == stored.routed_experts == make_experts(0, 9)
    assert verify(tmp_path) == []


async def test_experts_that_came_without_tokens_survive_a_crash_of_the_archive(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        ledger.append(Assigned("g0.0", 0, 1, 0))
        for start, end, experts in ((0, 3, None), (3, 3, make_experts(0, 5)), (3, 5, make_experts(5, 7))):
            spans = (Span(0, start, end),) if end > start else ()
            ledger.store_segment("g0.0", start, spans, *tokens("g0.0", start, end), routed_experts=experts)
        ledger.append(Dropped("g0.0", DropReason.GROUP_DEADLINE))
        await ledger.commit()
        write_archive(tmp_path, 1)
        issue(ledger, "g1.0", index=1)
        await ledger.archive(1)
    assert sum(len(list(file_pieces(path))) for path in archive_files(tmp_path)) == 6
    assert story(tmp_path, "g0.0").response.routed_experts == make_experts(0, 7)
    assert verify(tmp_path) == []


async def test_tokens_without_a_mask_were_drawn_from_the_whole_vocabulary(tmp_path):
    """As of a run that was resumed with a cut that it had not before."""
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        ledger.append(Assigned("g0.0", 0, 1, 0))
        mask = SamplingMask(np.array([2, 1], np.int32), np.array([3, 5, 9], np.int32))
        for start, end, recorded in ((0, 3, None), (3, 5, mask)):
            spans = (Span(0, start, end),)
            ledger.store_segment("g0.0", start, spans, *tokens("g0.0", start, end), sampling_mask=recorded)
        await ledger.commit()
        with reading(tmp_path) as connection:
            [found] = stored_recordings(connection, ["g0.0"]).values()
    assert found.sampling_mask.counts.tolist() == [0, 0, 0, 2, 1]
    assert found.sampling_mask.ids.tolist() == [3, 5, 9]
    assert found.routed_experts is None


async def archived_run(run):
    """A run whose newest checkpoint is older than what its one archive file has."""
    async with open_ledger(run) as ledger:
        await settle(ledger)
        ledger.append(checkpoint(2, 1))
        await ledger.archive(2)
    (file,) = archive_files(run)
    return file


USES = {
    "show": lambda run: story(run, "g0.0"),
    "resume": lambda run: recover(run, there=lambda one: one.step == 1),  # g1.0 is ready again
    "export": lambda run: export(run, run / f"{len(list(run.iterdir()))}.jsonl", responses=True),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_changed_file_of_the_archive_is_refused_in_one_line_and_not_opened(tmp_path, monkeypatch, use):
    file = await archived_run(tmp_path)
    use(tmp_path)
    for name in ("laminar_py.ledger.archive", "laminar_py.audit.stored"):
        monkeypatch.setattr(f"{name}.file_pieces", lambda *_: pytest.fail("opened, which can end the process"))
    whole = file.read_bytes()
    file.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    with pytest.raises(LedgerError, match=f"archive={file}: was changed since it was written; restore it"):
        use(tmp_path)


@pytest.mark.parametrize("use", [USES["show"], USES["resume"]], ids=["show", "resume"])
async def test_a_response_that_the_archive_has_lost_is_not_taken_for_an_empty_one(tmp_path, use):
    os.remove(await archived_run(tmp_path))
    with pytest.raises(LedgerError, match=r"none of the 7 tokens of g[01]\.0 is there; restore it"):
        use(tmp_path)


async def test_each_file_of_the_archive_is_digested_once_by_an_audit_and_once_by_a_resume(tmp_path, monkeypatch):
    async with open_ledger(tmp_path) as ledger:
        await settle(ledger)
        await ledger.archive(1)
        for step, id in ((3, "g2.0"), (4, "g4.0")):
            if id == "g4.0":
                make_ready(ledger, id, spans=((1, 0, 7),), index=4)
            ledger.append_all(consume(step, 1, id, staleness=step - 1))
            await ledger.archive(step)
    digested = []
    whole = archive.file_digest
    monkeypatch.setattr(archive, "file_digest", lambda path: digested.append(path) or whole(path))
    with statements(monkeypatch) as asked:
        verify(tmp_path)
    assert sorted(digested) == archive_files(tmp_path)
    assert len(archive_files(tmp_path)) == 3
    assert not [text for text in scans_of_the_log(tmp_path / LEDGER_NAME, asked) if "archived" in text]
    digested.clear()
    assert len(recover(tmp_path, there=lambda one: one.step == 1).live) == 3
    assert len(digested) == len(set(digested))
