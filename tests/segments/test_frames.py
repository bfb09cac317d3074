"""Frames: what was written is what is read, and what is damaged is lost and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.ledger.segments.frames import frame_digest, make_frame, read_frame, rebuild, whole_frames
from laminar_py.records.columns import Dtype, TokenValues
from laminar_py.records.pieces import ColumnPiece, PayloadLostError, Piece
from laminar_py.records.spans import Span
from tests.segments.pieces import make_piece

EMPTY = {"trajectory_id": "a", "name": "rewards", "values": TokenValues(Dtype.FLOAT32, b"")}

counts = st.integers(0, 2**31 - 1)
spans = st.lists(st.builds(Span, counts, counts, counts, st.none() | counts), max_size=3).map(tuple)


@st.composite
def token_pieces(draw):
    n = draw(st.integers(0, 20))
    return Piece(
        trajectory_id=draw(st.text(max_size=10)),
        epoch=draw(counts),
        start=draw(counts),
        spans=draw(spans),
        ids=draw(st.binary(min_size=4 * n, max_size=4 * n)),
        logprobs=draw(st.binary(min_size=4 * n, max_size=4 * n)),
        mask=draw(st.none() | st.binary(max_size=20)),
        experts=draw(st.none() | st.binary(max_size=20)),
        used_s=draw(st.floats(0, 1e9)),
    )


columns = st.builds(
    ColumnPiece,
    trajectory_id=st.text(max_size=10),
    name=st.text(max_size=10),
    values=st.builds(TokenValues, st.sampled_from(Dtype), st.binary(max_size=40)),
)
pieces = token_pieces() | columns


def bytes_of(piece):
    frame = make_frame(piece)
    data = b"".join(frame.buffers)
    assert len(data) == frame.num_bytes
    return data, frame.digest


@given(piece=pieces)
def test_what_was_written_is_what_is_read(piece):
    data, digest = bytes_of(piece)
    assert read_frame(memoryview(data), digest) == piece


@given(piece=pieces, data=st.data())
def test_a_frame_that_is_cut_or_goes_on_is_lost(piece, data):
    whole, digest = bytes_of(piece)
    end = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:end], whole + whole[: end + 1]):
        with pytest.raises(PayloadLostError):
            read_frame(memoryview(wrong), digest)


@given(body=st.binary(max_size=60), description=st.binary(max_size=60))
def test_bytes_that_nobody_wrote_are_lost_also_under_their_own_digest(description, body):
    with pytest.raises(PayloadLostError):
        rebuild(b"\xc1" + description, body)
    with pytest.raises(PayloadLostError):
        read_frame(memoryview(description + body), frame_digest(description, body))


@given(data=st.binary(max_size=200))
def test_any_bytes_begin_with_whole_frames_or_with_none(data):
    assert list(whole_frames(memoryview(data))) == []


@given(written=st.lists(pieces, max_size=5), data=st.data())
def test_a_file_is_read_to_where_its_frames_are_whole(written, data):
    frames = [bytes_of(piece)[0] for piece in written]
    whole = b"".join(frames)
    end = data.draw(st.integers(0, len(whole)))
    ends = [sum(map(len, frames[: count + 1])) for count in range(len(frames))]
    assert list(whole_frames(memoryview(whole)[:end])) == written[: sum(place <= end for place in ends)]


@pytest.mark.parametrize("tail", [b"\0" * 100, b"LPP1" + b"\xff" * 100, b"LPP1\1\0\0\0\1" + b"\0" * 100])
def test_a_file_whose_tail_is_no_frame_ends_before_it(tail):
    piece = make_piece()
    assert list(whole_frames(memoryview(bytes_of(piece)[0] + tail))) == [piece]


@pytest.mark.parametrize("piece", [make_piece(), make_piece(tokens=0), ColumnPiece(**EMPTY)])
def test_every_changed_bit_of_a_frame_is_noticed(piece):
    whole, digest = bytes_of(piece)
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadLostError):
            read_frame(memoryview(changed), digest)


def test_a_changed_byte_ends_a_file_there():
    first, second, third = (bytes_of(make_piece(f"g{index}.0"))[0] for index in range(3))
    for place in range(len(second)):
        changed = bytearray(second)
        changed[place] ^= 1
        found = [piece.trajectory_id for piece in whole_frames(memoryview(first + bytes(changed) + third))]
        assert found == ["g0.0"]
