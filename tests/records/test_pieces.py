"""Masks and experts: joining, packing, and what is said about bytes that are none."""

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.ledger.segments.frames import make_frame, read_frame
from laminar_py.records.codec import decode, encode
from laminar_py.records.pieces import (
    Piece,
    RoutedExperts,
    SamplingMask,
    join_experts,
    join_masks,
    pack_experts,
    pack_mask,
    unpack_experts,
    unpack_mask,
)
from laminar_py.records.spans import Span
from tests.builders import make_experts, make_mask

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=8)


def mask_of(rows):
    counts = np.array([len(row) for row in rows], np.int32)
    return SamplingMask(counts, np.array([id for row in rows for id in row], np.int32))


def rows_of(mask):
    ends = np.cumsum(mask.counts).tolist()
    return [mask.ids[end - count : end].tolist() for end, count in zip(ends, mask.counts.tolist(), strict=True)]


@given(ROWS, st.integers(0, 8))
def test_a_mask_survives_being_cut_joined_and_packed(rows, place):
    joined = join_masks([mask_of(rows[:place]), mask_of(rows[place:])])
    assert rows_of(unpack_mask(pack_mask(joined))) == rows


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_experts_survive_being_cut_joined_and_packed(start, first, second, width, other_width):
    middle, end = start + first, start + first + second
    pieces = make_experts(start, middle, width=width), make_experts(middle, end, width=other_width)
    joined = unpack_experts(pack_experts(join_experts(pieces)))
    assert joined == make_experts(start, end, width=max(width, other_width))


def test_experts_with_a_gap_an_overlap_or_another_shape_do_not_join():
    for start in (3, 5):
        with pytest.raises(ValueError, match="missing or stored twice"):
            join_experts([make_experts(0, 4), make_experts(start, 8)])
    with pytest.raises(ValueError, match="3 layers, top 2, then 2 layers, top 3"):
        join_experts([make_experts(0, 4), RoutedExperts(start=4, layers=2, top_k=3, width=1, data=bytes(6))])


@given(st.binary(max_size=40))
def test_bytes_that_are_no_recording_are_at_most_a_value_error(data):
    for unpack, record in ((unpack_mask, SamplingMask), (unpack_experts, RoutedExperts)):
        with contextlib.suppress(ValueError):
            assert isinstance(unpack(data), record)


def test_what_is_recorded_crosses_a_process():
    ids = np.arange(5, dtype=np.int32)
    experts = make_experts(0, 7)
    piece = Piece(
        trajectory_id="g0.0",
        epoch=1,
        start=0,
        spans=(Span(7, 0, 5),),
        ids=ids.tobytes(),
        logprobs=np.zeros(5, np.float32).tobytes(),
        mask=pack_mask(make_mask(ids)),
        experts=pack_experts(experts),
    )
    frame = make_frame(piece)
    received = read_frame(memoryview(b"".join(frame.buffers)), frame.digest)
    assert received == piece
    assert rows_of(unpack_mask(received.mask)) == rows_of(make_mask(ids))
    assert unpack_experts(received.experts) == experts
    without = make_frame(msgspec.structs.replace(piece, mask=None, experts=None))
    bare = read_frame(memoryview(b"".join(without.buffers)), without.digest)
    assert (bare.mask, bare.experts) == (None, None)
    assert decode(RoutedExperts, encode(experts)) == experts
    assert experts.positions == 7
