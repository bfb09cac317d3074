"""Segments of a run that were cut anywhere in their last frame: what audit and archive make of them."""

from laminar_lab.audit.checks import Rule
from laminar_lab.audit.verify import verify
from laminar_py.ledger.archive import archive_files, file_pieces
from laminar_py.ledger.database import segments_path
from laminar_py.ledger.segments.frames import make_frame
from laminar_py.ledger.segments.writer import segments_in
from tests.ledger.runs import archive, begin, consume, make_ready, open_ledger, read_response, write_archive
from tests.segments.pieces import make_piece


async def two_consumed(ledger):
    begin(ledger)
    for index, id in enumerate(("g0.0", "g1.0")):
        make_ready(ledger, id, index=index)
    ledger.append_all(consume(1, 0, "g0.0", "g1.0"))
    await ledger.commit()


async def test_a_frame_that_nobody_was_told_of_is_nothing_to_audit_and_archive_wherever_it_ends(tmp_path):
    frame = b"".join(make_frame(make_piece("g1.0")).buffers)
    async with open_ledger(tmp_path) as ledger:
        await two_consumed(ledger)
        (segment,) = segments_in(segments_path(tmp_path))
        told = segment.read_bytes()
        for end in range(len(frame) + 1):
            segment.write_bytes(told + frame[:end])
            assert len(read_response(tmp_path, "g1.0").ids) == 5, end
            assert verify(tmp_path) == [], end
            if end % 32 == 0:  # each is brought to the disk
                answer = await write_archive(ledger, 1, part=end)
                assert (answer.event.num_trajectories, answer.unreadable) == (2, {}), end
        assert await archive(ledger, 1) == 2
        segment.unlink()
        assert verify(tmp_path) == []


async def test_what_was_told_and_is_cut_costs_its_trajectory_alone_and_is_named(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await two_consumed(ledger)
        (segment,) = segments_in(segments_path(tmp_path))
        last = max(row.offset for row in await ledger.settled_pieces(1))
        for size in range(segment.stat().st_size - 1, last - 1, -1):
            with segment.open("r+b") as file:
                file.truncate(size)
            assert {(one.rule, one.subject) for one in verify(tmp_path)} == {(Rule.SPANS, "g1.0")}, size
            if (size - last) % 32 == 0:
                answer = await write_archive(ledger, 1, part=size)
                assert answer.event.num_trajectories == 1
                assert list(answer.unreadable) == [2]
                assert "ends before byte" in answer.unreadable[2]
        await ledger.archived([answer.event], [1])
        await ledger.record_lost_pieces([2], answer.unreadable[2])
    found = [{piece.row.trajectory for piece in file_pieces(path)} for path in archive_files(tmp_path)]
    assert found == [{1}] * len(found)
    assert len(read_response(tmp_path, "g0.0").ids) == 5
    assert verify(tmp_path) == []
