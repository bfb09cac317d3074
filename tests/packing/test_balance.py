"""Bins are full and within the cap, and ranks get alike ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from laminar_py.learner.packing.balance import (
    best_fit,
    deal_bins,
    find_families,
    fit_bins,
    group_size,
    level_costs,
    make_bin,
)
from laminar_py.learner.packing.layout import LEAST_STEM, RowSize, lay_out
from tests.builders import make_finished, make_trajectory

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=80)
SHARE = 0.001


def make_bins(lengths, capacity):
    items = [make_finished(f"g{i}.0", prompt=0, response=length) for i, length in enumerate(lengths)]
    families = find_families(items)
    return [make_bin(families[i] for i in members) for members in best_fit(lengths, capacity)]


def sizes(lengths):
    return [RowSize(length, length**2) for length in lengths]


def cost(packed):
    return packed.cost(SHARE)


@settings(deadline=None)
@given(LENGTHS)
def test_best_fit_puts_each_sequence_into_one_bin_of_bounded_size(lengths):
    bins = best_fit(lengths, 100)
    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in members) <= 100 for members in bins)


@settings(deadline=None)
@given(LENGTHS)
def test_best_fit_opens_a_bin_only_where_no_other_has_room(lengths):
    """So at most one bin is half empty or more, as no two of those could have been opened."""
    totals = [sum(lengths[item] for item in members) for members in best_fit(lengths, 100)]
    assert sum(total <= 50 for total in totals) <= 1


def test_best_fit_prefers_the_fullest_bin_that_has_room():
    assert best_fit([60, 70, 30], 100) == [[1, 2], [0]]


def test_a_sequence_above_the_cap_is_refused():
    with pytest.raises(ValueError, match=r"65 tokens exceeds packer\.max_tokens=64"):
        best_fit([3, 65], 64)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_dealing_gives_every_rank_a_bin_at_every_index_and_loses_nothing(lengths, ranks):
    indices = deal_bins(make_bins(lengths, 100), ranks=ranks, capacity=100, attention_share=SHARE)
    assert all(len(index) == ranks for index in indices)
    assert all(packed.num_tokens <= 100 for index in indices for packed in index)
    dealt = [item.num_tokens for index in indices for packed in index for item in packed.trajectories]
    assert sorted(dealt) == sorted(lengths)


def test_bins_of_one_index_are_alike():
    lengths = [100, 50, 50, 100, 50, 50, 90, 90]
    first, *_ = deal_bins(make_bins(lengths, 100), ranks=2, capacity=100, attention_share=SHARE)
    assert [len(packed.trajectories) for packed in first] == [1, 1]


def test_ranks_share_what_is_left_over():
    (index,) = deal_bins(make_bins([10] * 8, 100), ranks=4, capacity=100, attention_share=SHARE)
    assert [packed.num_tokens for packed in index] == [20, 20, 20, 20]


def test_over_many_sequences_ranks_wait_for_each_other_less_than_one_percent():
    rng = np.random.default_rng(0)
    lengths = np.clip(64 * np.exp(0.99 * rng.standard_normal(2048)), 1, 512).astype(int).tolist()
    indices = deal_bins(make_bins(lengths, 512), ranks=8, capacity=512, attention_share=1e-4)
    slowest = sum(max(packed.cost(1e-4) for packed in index) for index in indices)
    mean = sum(packed.cost(1e-4) for index in indices for packed in index) / 8
    assert slowest <= 1.01 * mean


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_levelled_bins_differ_by_one_sequence_at_most(lengths, bins):
    levelled = level_costs(sizes(lengths), bins, capacity=10_000, attention_share=0.0)
    totals = [sum(lengths[item] for item in members) for members in levelled]
    assert max(totals) - min(totals) <= max(lengths)


def test_what_cannot_be_levelled_within_the_cap_is_left_as_it_was():
    assert level_costs(sizes([60, 60, 40, 40, 50, 50]), 3, capacity=100, attention_share=0.0) is not None
    assert level_costs(sizes([50, 50, 40, 30, 30]), 2, capacity=100, attention_share=0.0) is None


def samples(groups, prompt, lengths):
    return [
        replace(
            make_trajectory(f"g{group}.{place}", prompt=prompt, response=length),
            prompt_ids=np.full(prompt, group + 2, np.int32),
        )
        for group in range(groups)
        for place, length in enumerate(lengths)
    ]


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 90),
    st.lists(st.integers(1, 100), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_bins_of_groups_are_as_large_as_their_rows(groups, prompt, lengths, ranks):
    items = samples(groups, prompt, lengths)
    bins = fit_bins(items, max_tokens=200)
    indices = deal_bins(bins, ranks=ranks, capacity=200, attention_share=SHARE)
    dealt = [packed for index in indices for packed in index]
    assert sorted(item.id for packed in dealt for item in packed.trajectories) == sorted(item.id for item in items)
    for packed in dealt:
        assert packed.num_tokens <= 200
        if packed.trajectories:
            assert sum(lay_out(packed.trajectories).lengths) <= packed.num_tokens, (
                "what shares by chance is shorter"
            )


@settings(deadline=None)
@given(st.integers(1, 90), st.lists(st.integers(1, 100), min_size=1, max_size=12), st.booleans())
def test_the_size_of_a_group_is_known_before_it_is_generated(prompt, lengths, shares):
    bins = fit_bins(samples(1, prompt, lengths), max_tokens=200, shares=shares)
    size = group_size(lengths, prompt=prompt, max_tokens=200, shares=shares)
    assert size.tokens == sum(packed.num_tokens for packed in bins)
    assert size.squares == sum(packed.squares for packed in bins)


def test_a_sequence_that_is_too_long_behind_a_shared_prompt_is_named_with_the_bound_of_a_row():
    with pytest.raises(ValueError, match=r"sequence of 5000 tokens exceeds packer.max_tokens=4096; raise it"):
        group_size([3000] * 4, prompt=2000, max_tokens=4096)


def test_samples_of_a_prompt_stay_together_where_that_saves_tokens():
    together, alone = (fit_bins(samples(2, prompt, [20] * 4), max_tokens=150) for prompt in (60, LEAST_STEM))
    assert [packed.num_tokens for packed in together] == [59 + 4 * 21] * 2
    assert [len(packed.families) for packed in alone] == [4, 4]


def test_a_group_is_divided_so_that_every_rank_has_work():
    bins = fit_bins(samples(1, 100, [20] * 8), max_tokens=1000)
    (index,) = deal_bins(bins, ranks=4, capacity=1000, attention_share=SHARE)
    assert [len(packed.trajectories) for packed in index] == [2, 2, 2, 2]


def test_a_row_sees_a_few_times_as_many_keys_as_it_has_tokens():
    """A long prompt with short responses: attention gathers the prompt's keys for each of them."""
    (packed,) = fit_bins(samples(1, 700, [10] * 16), max_tokens=8192)
    assert [len(family.members) for family in packed.families] == [4] * 4
