"""Settled responses move to the archive and stay findable."""

import json
import os

import numpy as np
import pytest

from laminar_lab.audit.export import export
from laminar_lab.audit.stories import read_story
from laminar_lab.audit.verify import verify
from laminar_py.ledger import archive
from laminar_py.ledger.archive import archive_files, file_pieces
from laminar_py.ledger.database import LEDGER_NAME, LedgerError, reading, segments_path
from laminar_py.ledger.recovery import recover
from laminar_py.ledger.responses import StoredResponses
from laminar_py.ledger.rows import trajectory_rows
from laminar_py.ledger.segments.writer import segments_in
from laminar_py.records.columns import token_values
from laminar_py.records.events import Assigned, Dropped
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason
from tests.builders import make_experts
from tests.ledger.runs import archive as move_to_archive
from tests.ledger.runs import (
    begin,
    checkpoint,
    consume,
    issue,
    make_ready,
    open_ledger,
    read_response,
    run_to,
    store,
    store_columns,
    tokens,
    write_archive,
)
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
        assert await move_to_archive(ledger, 1) == 2
        assert await move_to_archive(ledger, 1) == 0
    with reading(tmp_path) as connection:
        assert connection.execute("SELECT count(*) FROM piece").fetchone() == (4,)
    for id, length in (("g0.0", 7), ("g1.0", 7), ("g2.0", 7), ("g3.0", 4)):
        response = read_story(tmp_path, id).response
        ids, logprobs = tokens(id, 0, length)
        assert (response.ids.tolist(), response.logprobs.tolist()) == (ids.tolist(), logprobs.tolist())
    assert verify(tmp_path) == []


def responses_of(run, folder, name):
    """Ids of the tokens of every response, as an export has them."""
    export(run, folder / name, responses=True)
    found = map(json.loads, (folder / name).read_text().splitlines())
    return {one["id"]: (one["response_ids"], one["token_spans"]) for one in found}


async def test_a_crash_before_a_file_is_on_record_leaves_its_pieces_in_both_places_and_readers_agree(
    tmp_path, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("exports")
    async with open_ledger(tmp_path) as ledger:
        await settle(ledger)
        await ledger.commit()
        before = responses_of(tmp_path, folder, "before.jsonl")
        assert (await write_archive(ledger, 1)).event.num_trajectories == 2
        assert verify(tmp_path) == []
        assert responses_of(tmp_path, folder, "between.jsonl") == before
        ledger.append_all(consume(3, 1, "g2.0"))
        await move_to_archive(ledger, 1)
    assert sum(len(list(file_pieces(path))) for path in archive_files(tmp_path)) == 6
    assert len(read_story(tmp_path, "g0.0").response.ids) == 7
    assert responses_of(tmp_path, folder, "after.jsonl") == before
    assert verify(tmp_path) == []


async def test_a_crash_before_references_are_forgotten_leaves_pieces_in_both_places_and_readers_agree(
    tmp_path, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("exports")
    async with open_ledger(tmp_path) as ledger:
        await settle(ledger)
        ledger.append((await write_archive(ledger, 1)).event)
        await ledger.commit()
        before = responses_of(tmp_path, folder, "before.jsonl")
        assert (
            before["g0.0"][0] == read_response(tmp_path, "g0.0").ids.tolist() == tokens("g0.0", 0, 7)[0].tolist()
        )
        assert verify(tmp_path) == []
        assert await move_to_archive(ledger, 1) == 2
    assert len(archive_files(tmp_path)) == 2
    assert responses_of(tmp_path, folder, "after.jsonl") == before
    assert read_response(tmp_path, "g0.0").ids.tolist() == before["g0.0"][0]
    assert verify(tmp_path) == []


async def test_a_lost_archive_is_found_out(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await settle(ledger)
        await move_to_archive(ledger, 1)
    assert verify(tmp_path) == []
    (file,) = (tmp_path / "archive").iterdir()
    os.remove(file)
    assert {finding.subject for finding in verify(tmp_path)} == {"g0.0", "g3.0", f"archive/{file.name}"}


async def test_experts_that_came_without_tokens_survive_a_crash_of_the_archive(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        ledger.append(Assigned("g0.0", 0, 1, 0))
        for start, end, experts in ((0, 3, None), (3, 3, make_experts(0, 5)), (3, 5, make_experts(5, 7))):
            spans = (Span(0, start, end),) if end > start else ()
            store(ledger, "g0.0", start, end, spans, routed_experts=experts)
        ledger.append(Dropped("g0.0", DropReason.GROUP_DEADLINE))
        await ledger.commit()
        ledger.append((await write_archive(ledger, 1)).event)
        issue(ledger, "g1.0", index=1)
        await move_to_archive(ledger, 1)
    assert sum(len(list(file_pieces(path))) for path in archive_files(tmp_path)) == 6
    assert read_story(tmp_path, "g0.0").response.routed_experts == make_experts(0, 7)
    assert verify(tmp_path) == []


async def archived_run(run):
    """A run whose newest checkpoint is older than what its one archive file has."""
    async with open_ledger(run) as ledger:
        await settle(ledger)
        ledger.append(checkpoint(2, 1))
        await move_to_archive(ledger, 2)
    (file,) = archive_files(run)
    return file


USES = {
    "show": lambda run: read_response(run, "g0.0"),
    "export": lambda run: export(run, run / f"{len(list(run.iterdir()))}.jsonl", responses=True),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_changed_file_of_the_archive_is_refused_in_one_line_and_not_opened(tmp_path, monkeypatch, use):
    file = await archived_run(tmp_path)
    use(tmp_path)
    for name in (
        "laminar_py.ledger.responses",
        "laminar_lab.audit.responses",
    ):
        monkeypatch.setattr(f"{name}.file_pieces", lambda *_: pytest.fail("opened"))
    whole = file.read_bytes()
    file.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    message = f"archive={file}: was changed since it was written; restore it"
    with pytest.raises(LedgerError, match=message):
        use(tmp_path)
    assert message in read_story(tmp_path, "g0.0").lost


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_response_that_the_archive_has_lost_is_not_taken_for_an_empty_one(tmp_path, use):
    os.remove(await archived_run(tmp_path))
    with pytest.raises(LedgerError, match=r"trajectory=g[01]\.0: 0 of its 7 tokens are in .*; restore them"):
        use(tmp_path)
    assert read_story(tmp_path, "g0.0").lost.startswith("trajectory=g0.0: 0 of its 7 tokens")


async def test_a_resume_that_needs_what_is_in_the_archive_is_refused_in_one_line(tmp_path):
    await archived_run(tmp_path)
    assert [one.id for one in recover(tmp_path).live] == ["g2.0"]
    with pytest.raises(LedgerError, match=r"trajectory=g1\.0: .* in the archive") as refused:
        recover(tmp_path, exists=lambda one: one.step == 1)  # g1.0 would be ready again
    assert "\n" not in str(refused.value)


async def test_each_file_of_the_archive_is_digested_once_by_an_audit_and_once_by_an_export(tmp_path, monkeypatch):
    async with open_ledger(tmp_path) as ledger:
        await settle(ledger)
        await move_to_archive(ledger, 1)
        for step, id in ((3, "g2.0"), (4, "g4.0")):
            if id == "g4.0":
                make_ready(ledger, id, spans=((1, 0, 7),), index=4)
            ledger.append_all(consume(step, 1, id, staleness=step - 1))
            await move_to_archive(ledger, step)
    digested = []
    whole = archive.file_digest
    monkeypatch.setattr(archive, "file_digest", lambda path: digested.append(path) or whole(path))
    with statements(monkeypatch) as asked:
        verify(tmp_path)
    assert sorted(digested) == archive_files(tmp_path)
    assert len(archive_files(tmp_path)) == 3
    assert not [text for text in scans_of_the_log(tmp_path / LEDGER_NAME, asked) if "archived" in text]
    digested.clear()
    assert USES["export"](tmp_path) == 5
    assert sorted(digested) == archive_files(tmp_path)
    digested.clear()
    with reading(tmp_path) as connection:
        responses = StoredResponses(tmp_path, connection)
        assert [len(responses.response(row).ids) for row in trajectory_rows(connection)] == [7, 7, 7, 4, 7]
    assert len(digested) == len(set(digested)) > 0


async def test_columns_are_in_the_archive_too(tmp_path):
    columns = {
        "token_rewards": token_values(np.array([0, 0, 1, 0, 2, 1, 0], np.float32)),
        "hints": token_values(np.arange(7, dtype=np.int32)),
    }
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1))
        make_ready(ledger, "g0.0", spans=((0, 0, 3), (1, 3, 7)))
        store_columns(ledger, "g0.0", columns)
        ledger.append_all(consume(1, 1, "g0.0"))
        for _ in range(2):
            await ledger.commit()
            with reading(tmp_path) as connection:
                (row,) = trajectory_rows(connection)
                assert StoredResponses(tmp_path, connection).columns(row) == columns
            assert verify(tmp_path) == []
            await move_to_archive(ledger, 1)
    assert len(archive_files(tmp_path)) == 1


def cut_to(run, num_bytes):
    """The one segment of a run, as a disk left it that lost its end."""
    (segment,) = segments_in(segments_path(run))
    with segment.open("r+b") as file:
        file.truncate(num_bytes)


async def test_a_file_of_the_archive_leaves_out_what_cannot_be_read_whole_and_names_it(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await settle(ledger)
        rows = await ledger.settled_pieces(1)
        cut_to(tmp_path, max(row.offset + row.num_bytes for row in rows) - 1)  # g3.0, which comes last
        flip(tmp_path, rows[1].offset + rows[1].num_bytes - 1)  # the second of two pieces of g0.0
        answer = await write_archive(ledger, 1)
    assert (list(answer.unreadable), answer.event.num_trajectories) == ([1, 4], 0)
    assert "from byte" in answer.unreadable[1]
    assert "ends before byte" in answer.unreadable[4]
    (path,) = archive_files(tmp_path)
    assert list(file_pieces(path)) == [], "half of a response is of no use"


def flip(run, place):
    """Change one byte of the one segment of a run."""
    (segment,) = segments_in(segments_path(run))
    with segment.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
