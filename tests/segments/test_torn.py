"""Files that were cut anywhere in their last frame, as a death in the midst of a write leaves them.

Nobody was told of that frame; and where somebody was, since the power failed after it, it alone is lost, by name.
"""

from itertools import pairwise

import pytest

from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.salvage import RecordedProgress, salvage
from laminar_py.ledger.segments.writer import SEGMENT, Journal, SegmentWriter
from laminar_py.records.pieces import PayloadLostError
from tests.segments.pieces import make_piece

PIECES = [make_piece("a"), make_piece("b"), make_piece("c")]


@pytest.fixture
def written(tmp_path):
    """References to three pieces in a segment, and the segment."""
    writer = SegmentWriter(tmp_path, "replica-3-1-0")
    refs = writer.write_all(PIECES)
    writer.close()
    return refs, tmp_path / f"{refs[0].segment}{SEGMENT}"


def cuts(path, begin):
    """The file cut at every byte from `begin` on, the shortest last."""
    for size in range(path.stat().st_size - 1, begin - 1, -1):
        with path.open("r+b") as file:
            file.truncate(size)
        yield size


def test_a_reader_finds_all_that_was_told_and_names_what_is_cut(tmp_path, written):
    (*told, last), path = written
    for size in cuts(path, last.offset):
        loaded = PayloadReader(tmp_path).load([*told, last])
        assert [loaded.piece(ref) for ref in told] == PIECES[:2], size
        with pytest.raises(PayloadLostError, match=f"{last.segment} from byte .*: the file ends before byte"):
            loaded.piece(last)


def test_salvage_gives_back_what_was_noted_before_the_cut(tmp_path):
    journal = Journal(tmp_path, "replica-3-1-0")
    for start in range(0, 15, 5):
        journal.write([make_piece("a", start=start)])
    (path,) = tmp_path.glob("*.journal")
    ends = [0, *(path.stat().st_size * place // 3 for place in (1, 2, 3))]
    for size in cuts(path, 0):
        found = salvage(tmp_path, "replica-3-1-0", {"a": RecordedProgress(1, 0)}).found
        whole = sum(end <= size for end in ends[1:])
        assert [one.tokens.end for one in found] == ([5 * whole] if whole else []), size
        loaded = PayloadReader(tmp_path).load(one.tokens.at for one in found)
        assert [loaded.piece(one.tokens.at) for one in found] == [make_piece("a", tokens=5 * whole)] * bool(whole)
    assert all(first < second for first, second in pairwise(ends))


def test_a_part_that_starts_again_writes_to_another_file_and_never_after_a_cut(tmp_path, written):
    (*_, last), path = written
    next(cuts(path, last.offset + 1))
    size = path.stat().st_size
    ref = SegmentWriter(tmp_path, "replica-3-1-0").write(PIECES[2])
    assert ref.segment != last.segment
    assert path.stat().st_size == size
    assert PayloadReader(tmp_path).load([ref]).piece(ref) == PIECES[2]
