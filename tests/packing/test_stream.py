"""Whatever comes and goes, the stream packer holds what is there, in bins within the cap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.learner.packing.stream import WINDOW, StreamPacker
from tests.builders import make_finished
from tests.depth import examples

CAP = 16  # so that a few hundred sequences fill many bins
CHANGES = st.lists(st.tuples(st.booleans(), st.integers(2, CAP)), max_size=400)


def sequence(index, num_tokens):
    return make_finished(f"g{index}.0", prompt=1, response=num_tokens - 1)


def held(packer):
    return sorted(entry.trajectory.id for packed in packer.bins() for entry in packed.entries)


@settings(max_examples=examples(50), deadline=None)
@given(CHANGES)
def test_bins_hold_exactly_what_was_added_and_not_removed(changes):
    packer, here = StreamPacker(max_tokens=CAP), {}
    for index, (removes, number) in enumerate(changes):
        if removes and here:
            packer.remove(here.pop(list(here)[number % len(here)]))
        else:
            here[index] = f"g{index}.0"
            packer.add(sequence(index, number))
    assert held(packer) == sorted(here.values())
    assert len(packer) == len(here)
    assert all(packed.num_tokens <= CAP for packed in packer.bins())


def test_full_bins_are_kept_while_more_comes_in():
    packer = StreamPacker(max_tokens=CAP)
    for index in range(4 * WINDOW):
        packer.add(sequence(index, CAP // 2))
    before = {id(packed) for packed in packer.bins()}
    packer.add(sequence(4 * WINDOW, CAP // 2))
    assert len(before & {id(packed) for packed in packer.bins()}) == 2 * WINDOW


def test_a_stream_fills_as_well_as_a_batch():
    rng = np.random.default_rng(1)
    lengths = np.clip(64 * np.exp(0.99 * rng.standard_normal(1500)), 2, 512).astype(int).tolist()
    packer = StreamPacker(max_tokens=512)
    for index, length in enumerate(lengths):
        packer.add(sequence(index, length))
    assert len(packer.bins()) <= np.ceil(1.005 * sum(lengths) / 512)


def test_a_sequence_above_the_cap_is_refused_by_name():
    with pytest.raises(ValueError, match=r"g7\.0 has 17 tokens, packer\.max_tokens=16"):
        StreamPacker(max_tokens=CAP).add(sequence(7, 17))


def test_a_sequence_is_packed_once():
    packer = StreamPacker(max_tokens=CAP)
    packer.add(sequence(7, 4))
    with pytest.raises(AssertionError, match="twice"):
        packer.add(sequence(7, 4))
