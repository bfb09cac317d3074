"""Masks and experts: joining, packing, and what is said about bytes that are none."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.records.pieces import (
    RoutedExperts,
    SamplingMask,
    join_experts,
    join_masks,
    pack_experts,
    pack_mask,
    unpack_experts,
    unpack_mask,
)
from tests.builders import make_experts

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
