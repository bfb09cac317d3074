"""Lost pieces: what only a host had that is gone, or what was changed there, is told, and costs nothing else."""

import json
import sqlite3

import pytest

from laminar_lab.audit.checks import Rule
from laminar_lab.audit.export import export
from laminar_lab.audit.stories import read_story
from laminar_lab.audit.verify import verify
from laminar_py.ledger.archive import archive_files, file_pieces
from laminar_py.ledger.database import LedgerError, reading, segments_path
from laminar_py.ledger.recovery import recover
from laminar_py.ledger.responses import StoredResponses
from laminar_py.ledger.rows import trajectory_rows
from laminar_py.ledger.segments.writer import SegmentWriter, segments_in
from laminar_py.records.columns import token_values
from laminar_py.records.events import Dropped
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason
from tests.ledger.runs import (
    begin,
    consume,
    issue,
    make_ready,
    open_ledger,
    payload_of,
    read_response,
    run_to,
    score,
    store,
    store_columns,
    tokens,
    write_archive,
)


def on_host(ledger, label):
    """What is stored from now on is written by another part, on another host."""
    payload = payload_of(ledger)
    payload.writer.close()
    payload.writer = SegmentWriter(segments_path(ledger._path.parent), label)


async def run_on_two_hosts(ledger):
    """Two groups whose first half is of host 0; the second half of g1.0, and columns of it, are of host 1."""
    begin(ledger)
    make_ready(ledger, "g0.0")
    issue(ledger, "g1.0", index=1)
    run_to(ledger, "g1.0", [(0, 0, 3)])
    on_host(ledger, "replica-1-1-1")
    store(ledger, "g1.0", 3, 5, (Span(0, 3, 5),))
    score(ledger, "g1.0", [(0, 0, 5)])
    store_columns(ledger, "g1.0", {"token_rewards": token_values(tokens("g1.0", 0, 5)[1])})
    issue(ledger, "g2.0", index=2)
    run_to(ledger, "g2.0", [(0, 0, 4)])
    on_host(ledger, "replica-0-1-0")
    await ledger.commit()


def segment_of(run, label):
    """Name of the one segment of a part."""
    (path,) = (path for path in segments_in(segments_path(run)) if path.name.startswith(label))
    return path.stem


async def test_the_ledger_knows_who_has_something_in_which_segment(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await run_on_two_hosts(ledger)
        first, second = (segment_of(tmp_path, label) for label in ("replica-0-1-0", "replica-1-1-1"))
        assert await ledger.segments() == {first, second}
        assert await ledger.holders({first}) == [1, 2]
        assert await ledger.holders({second}) == [2, 3]
        assert await ledger.holders({first, second}) == [1, 2, 3]
        assert await ledger.holders({"replica-9-1-9.1.2"}) == []
        await ledger.record_lost_pieces(await ledger.holders({second}), "host 10.0.0.7 is gone")
        assert await ledger.holders({first, second}) == [1], "of what is lost nothing is needed any more"
        assert await ledger.segments() == {first}


@pytest.mark.parametrize("damage", ["deleted", "cut"])
async def test_lost_pieces_are_violations_and_none_once_their_loss_is_on_record(tmp_path, damage):
    async with open_ledger(tmp_path) as ledger:
        await run_on_two_hosts(ledger)
        assert verify(tmp_path) == []
        path = segments_path(tmp_path) / f"{segment_of(tmp_path, 'replica-1-1-1')}.segment"
        path.unlink() if damage == "deleted" else path.write_bytes(path.read_bytes()[:10])
        found = {(one.rule, one.subject) for one in verify(tmp_path)}
        assert found == {
            (Rule.SPANS, "g1.0"),
            (Rule.SPANS, "g2.0"),
            (Rule.ROWS, "column token_rewards of g1.0"),
        }
        await ledger.record_lost_pieces([2, 3], "host 10.0.0.7 is gone")
        for id in ("g1.0", "g2.0"):
            ledger.append(Dropped(id, DropReason.HOST_LOST, "host 10.0.0.7 is gone"))
        await ledger.commit()
    assert verify(tmp_path) == []


async def test_a_mark_of_loss_takes_no_proof_of_what_was_finished_away(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await run_on_two_hosts(ledger)
        await ledger.record_lost_pieces([1], "host 10.0.0.7 is gone")
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    with connection:
        connection.execute("UPDATE piece SET digest = zeroblob(16) WHERE trajectory = 1")
    connection.close()
    (found,) = verify(tmp_path)
    assert (found.rule, found.subject) == (Rule.SPANS, "g0.0")


async def test_a_lost_response_is_refused_told_in_its_story_and_empty_in_an_export(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await run_on_two_hosts(ledger)
        await ledger.record_lost_pieces([2], "host 10.0.0.7 is gone")
        assert await ledger.settled_pieces(9) == []
    with pytest.raises(LedgerError, match=r"trajectory=g1\.0: its tokens cannot be read \(on record as lost\)"):
        read_response(tmp_path, "g1.0")
    assert "on record as lost" in read_story(tmp_path, "g1.0").lost
    export(tmp_path, tmp_path / "out.jsonl", responses=True)
    found = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert {one["id"]: len(one["response_ids"]) for one in found} == {"g0.0": 5, "g1.0": 0, "g2.0": 4}


async def test_a_resume_gets_references_of_what_is_lost_and_none_leads_anywhere(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await run_on_two_hosts(ledger)
        await ledger.record_lost_pieces([2], "host 10.0.0.7 is gone")
    live = {one.id: one for one in recover(tmp_path).live}
    assert {ref.at.segment for ref in live["g1.0"].tokens} == {""}
    assert live["g1.0"].tokens[-1].end == 5
    assert {ref.at.segment for ref in live["g0.0"].tokens} != {""}


async def archive_by_host(ledger, step):
    """As the controller does: a file for each host, on record together."""
    rows = await ledger.settled_pieces(step)
    answers = []
    for part, label in enumerate(sorted({row.segment.partition(".")[0] for row in rows})):
        mine = [row for row in rows if row.segment.startswith(label)]
        answers.append(await write_archive(ledger, step, rows=mine, part=part))
    return answers, sorted({row.trajectory for row in rows})


async def settled_on_two_hosts(ledger):
    await run_on_two_hosts(ledger)
    for id in ("g1.0", "g2.0"):
        ledger.append(Dropped(id, DropReason.GROUP_DEADLINE))
    ledger.append_all(consume(1, 0, "g0.0"))


async def test_a_response_of_two_hosts_is_in_two_files_and_read_as_one(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await settled_on_two_hosts(ledger)
        before = read_response(tmp_path, "g1.0")
        answers, numbers = await archive_by_host(ledger, 1)
        await ledger.archived([one.event for one in answers], numbers)
    assert [[piece.row.trajectory for piece in file_pieces(path)] for path in archive_files(tmp_path)] == [
        [1, 2],
        [2, 2, 3],
    ]
    assert read_response(tmp_path, "g1.0").ids.tolist() == before.ids.tolist() == tokens("g1.0", 0, 5)[0].tolist()
    assert verify(tmp_path) == []
    export(tmp_path, tmp_path / "out.jsonl", responses=True)
    found = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert {one["id"]: len(one["response_ids"]) for one in found} == {"g0.0": 5, "g1.0": 5, "g2.0": 4}
    with reading(tmp_path) as connection:
        (row,) = trajectory_rows(connection, "id = 'g1.0'")
        assert list(StoredResponses(tmp_path, connection).columns(row)) == ["token_rewards"]


async def test_half_of_a_response_in_the_archive_is_a_violation_but_where_the_rest_is_on_record_as_lost(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await settled_on_two_hosts(ledger)
        (_, second), numbers = await archive_by_host(ledger, 1)
        first = archive_files(tmp_path)[0]
        first.unlink()  # host 0 is gone, before its file was on record
        await ledger.archived([second.event], [3])
        await ledger.record_lost_pieces([1, 2], "host 10.0.0.7 is gone")
        assert numbers == [1, 2, 3]
    assert verify(tmp_path) == []
    assert len(read_response(tmp_path, "g2.0").ids) == 4
    async with open_ledger(tmp_path) as ledger:
        await ledger.archived([], [2])  # and the marks are gone
    found = [(one.rule, one.subject) for one in verify(tmp_path)]
    assert (Rule.SPANS, "g1.0") in found
    assert len({subject for _, subject in found}) == 1
