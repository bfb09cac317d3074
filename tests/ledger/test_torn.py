"""Segments of a run that were cut anywhere in their last frame, and what the audit says of them."""

from laminar_lab.audit.checks import Rule
from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import reading, segments_path
from laminar_py.ledger.pieces import piece_rows
from laminar_py.ledger.segments.frames import make_frame
from laminar_py.ledger.segments.writer import segments_in
from laminar_py.records.events import Dropped
from laminar_py.records.trajectory import DropReason
from tests.ledger.runs import begin, consume, make_ready, open_ledger, read_response
from tests.segments.pieces import make_piece


async def two_ready(ledger):
    begin(ledger)
    for index, id in enumerate(("g0.0", "g1.0")):
        make_ready(ledger, id, index=index)
    ledger.append_all(consume(1, 0, "g0.0"))
    await ledger.commit()


async def test_the_audit_ignores_a_frame_without_a_reference_wherever_it_ends(tmp_path):
    frame = b"".join(make_frame(make_piece("g1.0")).buffers)
    async with open_ledger(tmp_path) as ledger:
        await two_ready(ledger)
        (segment,) = segments_in(segments_path(tmp_path))
        written = segment.read_bytes()
        for end in range(0, len(frame) + 1, 8):
            segment.write_bytes(written + frame[:end])
            assert len(read_response(tmp_path, "g1.0").ids) == 5, end
            assert verify(tmp_path) == [], end


async def test_a_response_that_was_cut_is_a_finding_unless_it_was_dropped_for_that(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        await two_ready(ledger)
        (segment,) = segments_in(segments_path(tmp_path))
        with reading(tmp_path) as connection:
            last = max(row.offset for row in piece_rows(connection))
        for size in range(segment.stat().st_size - 1, last - 1, -8):
            with segment.open("r+b") as file:
                file.truncate(size)
            assert {(one.rule, one.subject) for one in verify(tmp_path)} == {(Rule.SPANS, "g1.0")}, size
        ledger.append(Dropped("g1.0", DropReason.TOKENS_LOST, "its segment ends too early"))
    assert len(read_response(tmp_path, "g0.0").ids) == 5
    assert verify(tmp_path) == []
