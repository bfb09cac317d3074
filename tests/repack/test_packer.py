"""The packer keeps its invariants for any lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.config import Aggregation
from laminar_py.repack.balance import best_fit, spread
from laminar_py.repack.packer import loss_weights, pack
from tests.builders import make_trajectory

LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 80)), min_size=1, max_size=40)


def trajectories(shapes, **kwargs):
    return [make_trajectory(f"g{i}.0", prompt=p, response=n, seed=i, **kwargs) for i, (p, n) in enumerate(shapes)]


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.sampled_from(list(Aggregation)))
def test_every_trained_token_stands_in_one_microbatch_of_bounded_size(shapes, ranks, aggregation):
    items = trajectories(shapes)
    packed = pack(items, max_tokens=128, ranks=ranks, aggregation=aggregation, attention_share=0.01)
    assert len({len(batches) for batches in packed}) == 1
    flat = [batch for batches in packed for batch in batches]
    assert all(batch.num_tokens <= 128 for batch in flat)
    assert sum(float(b.loss_weights.sum()) for b in flat) == pytest.approx(1.0, rel=1e-5)
    assert sum(int((b.loss_weights > 0).sum()) for b in flat) == sum(n for _, n in shapes)


def test_arrays_stand_at_the_position_that_predicts_the_token():
    item = make_trajectory("g0.0", prompt=2, response=3, advantage=0.5)
    [[batch]] = pack([item], max_tokens=16, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.0)
    assert batch.input_ids.tolist() == [*item.prompt_ids, *item.response_ids]
    assert batch.labels.tolist() == [*batch.input_ids[1:], 0]
    assert batch.behaviour_logprobs[1:4].tolist() == item.logprobs.tolist()
    assert batch.advantages.tolist() == [0, 0.5, 0.5, 0.5, 0]
    assert batch.loss_weights.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4]


def test_sequence_mean_gives_every_response_the_same_weight():
    weights = loss_weights(trajectories([(1, 10), (1, 90)]), Aggregation.SEQUENCE_MEAN)
    assert [float(w.sum()) for w in weights] == pytest.approx([0.5, 0.5])


def test_a_reweighted_trajectory_counts_less():
    items = [make_trajectory("a", weight=0.5, response=4), make_trajectory("b", response=4)]
    weights = loss_weights(items, Aggregation.TOKEN_MEAN)
    assert [float(w.sum()) for w in weights] == pytest.approx([0.25, 0.5])


def test_a_sequence_above_the_cap_is_refused():
    with pytest.raises(ValueError, match=r"packer\.max_tokens=64"):
        best_fit([65], 64)


@settings(deadline=None)
@given(st.lists(st.floats(1, 100), min_size=1, max_size=60), st.integers(1, 8))
def test_spread_leaves_no_bin_heavier_than_the_mean_plus_one_item(costs, bins):
    loads = [sum(costs[i] for i in members) for members in spread(costs, bins)]
    assert max(loads) <= sum(costs) / bins + max(costs) + 1e-6


def test_loss_mask_keeps_environment_tokens_out():
    item = make_trajectory("a", prompt=1, response=4, loss_mask=np.array([True, False, False, True]))
    [[batch]] = pack([item], max_tokens=16, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.0)
    assert (batch.loss_weights > 0).tolist() == [True, False, False, True, False]
