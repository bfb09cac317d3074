"""The packer keeps its invariants for any lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from laminar_py.config.algorithm import Advantage, Aggregation
from laminar_py.learner.losses.advantages import group_advantages
from laminar_py.learner.packing.balance import fit_bins
from laminar_py.learner.packing.packer import Packed, StepWeights, deal_to_ranks, pack, step_weights
from laminar_py.records.columns import TOKEN_REWARDS, Column, Dtype, token_values
from laminar_py.records.credit import RoleCredit, returns_of, role_advantages
from laminar_py.records.pieces import RoutedExperts, TokensRef
from laminar_py.records.spans import NEW_CONVERSATION, Span, sampled_mask
from tests.builders import make_ref, make_trajectory
from tests.depth import examples
from tests.stored import at_ranks, by_reference

LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 80)), min_size=1, max_size=40)
FIELDS = ("input_ids", "position_ids", "labels", "loss_weights", "behaviour_logprobs", "advantages")


def trajectories(shapes, **kwargs):
    return [make_trajectory(f"g{i}.0", prompt=p, response=n, seed=i, **kwargs) for i, (p, n) in enumerate(shapes)]


def pack_here(items, *, ranks=1, max_tokens=128, aggregation=Aggregation.TOKEN_MEAN):
    return pack(items, max_tokens=max_tokens, ranks=ranks, aggregation=aggregation, attention_share=0.01)


@settings(max_examples=examples(50), deadline=None)
@given(LENGTHS, st.integers(1, 4), st.sampled_from(list(Aggregation)))
def test_every_trained_token_stands_in_one_microbatch_of_bounded_size(shapes, ranks, aggregation):
    packed = pack_here(trajectories(shapes), ranks=ranks, aggregation=aggregation)
    assert len({len(bundles) for bundles in packed.bundles}) == 1
    flat = [batch for rank in range(ranks) for batch in packed.microbatches(rank)]
    assert all(batch.num_tokens <= 128 for batch in flat)
    trained = sum(n for _, n in shapes)
    total = trained / len(shapes) if aggregation is Aggregation.CONSTANT else 1.0
    assert sum(float(b.loss_weights.sum()) for b in flat) == pytest.approx(total, rel=1e-5)
    assert sum(int((b.loss_weights > 0).sum()) for b in flat) == trained


def referred_to(item):
    """A trajectory as the controller has it."""
    return by_reference(item, (TokensRef(0, len(item.response_ids), make_ref()),))


def rewarded(item, seed):
    """A trajectory whose tokens have rewards of their own."""
    rewards = np.random.default_rng(seed).integers(-2, 3, len(item.response_ids)).astype(np.float32)
    return replace(item, advantage=float(rewards.sum()), columns={TOKEN_REWARDS: token_values(rewards)})


def episode(item, seed):
    """A trajectory of three turns, which two roles took; each turn begins anew."""
    rng, spans, place = np.random.default_rng(seed), [], 0
    for _ in range(3):
        spans += [Span(None, place, place + 1, follows=NEW_CONVERSATION), Span(0, place + 1, place + 4)]
        place += 4
    ids = rng.integers(2, 50, place).astype(np.int32)
    roles = tuple(
        RoleCredit(role=role, reward=1.0, turns=turns, advantage=float(rng.normal()))
        for role, turns in (("black", (1, 3)), ("white", (2,)))
    )
    return replace(
        item,
        response_ids=ids,
        logprobs=-rng.random(place).astype(np.float32),
        loss_mask=sampled_mask(spans, place),
        spans=tuple(spans),
        roles=roles,
        columns={},
    )


def test_tokens_of_a_turn_have_the_advantage_of_its_role():
    item = episode(make_trajectory("g0.0", prompt=1), 3)
    (batch,) = pack_here([item]).microbatches(0)
    black, white = (role.advantage for role in item.roles)
    found = batch.advantages[batch.loss_weights > 0]
    assert found.tolist() == pytest.approx([black] * 3 + [white] * 3 + [black] * 3)


def test_under_batch_std_a_role_of_one_alone_is_compared_in_the_step():
    rewards = [np.array([1.0]), np.array([1.0, 0.0])]
    credited = [
        group_advantages(Advantage.BATCH_STD)([returns_of(value) for value in each])[0] for each in rewards
    ]
    assert [one.tolist() for one in credited] == [[1.0], [1.0, 0.0]]
    assert group_advantages(Advantage.GROUP_STD)([returns_of(1.0)])[0].tolist() == [0.0]


def test_advantages_of_roles_are_normalised_over_all_tokens_of_a_step():
    items = [episode(item, seed) for seed, item in enumerate(trajectories([(1, 12), (1, 12)]))]
    bins = fit_bins(items, max_tokens=128)
    terms = step_weights(bins, aggregation=Aggregation.TOKEN_MEAN, normalises=True)
    given = np.concatenate([role_advantages(item.roles, item.spans)[item.loss_mask] for item in items])
    found = np.concatenate([terms.advantages(item)[item.loss_mask] for item in items])
    np.testing.assert_allclose(found, (given - given.mean()) / (given.std() + 1e-4), rtol=1e-4)


@settings(max_examples=examples(50), deadline=None)
@given(LENGTHS, st.integers(1, 4), st.sampled_from(list(Aggregation)), st.sets(st.integers(0, 39)))
def test_a_trajectory_is_packed_alike_with_its_tokens_and_by_reference(shapes, ranks, aggregation, with_rewards):
    items = trajectories(shapes, advantage=0.5)
    items = [rewarded(item, place) if place in with_rewards else item for place, item in enumerate(items)]
    items[-1] = episode(items[-1], 7)
    steps = []
    for given_as in (items, [referred_to(item) for item in items]):
        bins = fit_bins(given_as, max_tokens=128)
        terms = step_weights(bins, aggregation=aggregation, normalises=True, constant=7)
        packed = deal_to_ranks(bins, terms, max_tokens=128, ranks=ranks, attention_share=0.01)
        steps.append(([[[one.id for one in bundle] for bundle in mine] for mine in packed.bundles], terms))
    (ids, terms), (ids_by_reference, terms_by_reference) = steps
    assert ids == ids_by_reference
    assert terms == terms_by_reference


def test_one_that_is_masked_is_weighted_alike_with_its_tokens_and_by_reference():
    masked, trained = trajectories([(2, 5), (3, 7)])
    masked = replace(rewarded(masked, 0), loss_mask=np.zeros(5, np.bool_))
    counts = [
        step_weights([*fit_bins(both, max_tokens=64)], aggregation=Aggregation.TOKEN_MEAN)
        for both in ([masked, trained], [referred_to(masked), referred_to(trained)])
    ]
    assert counts[0] == counts[1]
    assert counts[0].num_trained == 7


@settings(max_examples=examples(30), deadline=None)
@given(LENGTHS)
def test_a_packed_sequence_has_the_arrays_that_it_has_alone(shapes):
    """So a token's loss depends on nothing but its sequence and the totals of the step."""
    items = trajectories(shapes)
    packed = pack_here(items)
    alone = {}
    for item in items:
        (batch,) = Packed([[[item]]], packed.weights).microbatches(0)
        alone[item.id] = batch
    for bundle, batch in zip(packed.bundles[0], packed.microbatches(0), strict=True):
        for place, item in enumerate(bundle):
            rows = slice(batch.cu_seqlens[place], batch.cu_seqlens[place + 1])
            for name in FIELDS:
                assert np.array_equal(getattr(batch, name)[rows], getattr(alone[item.id], name)), name


def test_arrays_stand_at_the_position_that_predicts_the_token():
    item = make_trajectory("g0.0", prompt=2, response=3, advantage=0.5)
    [batch] = pack_here([item]).microbatches(0)
    assert batch.input_ids.tolist() == [*item.prompt_ids, *item.response_ids]
    assert batch.labels.tolist() == [*batch.input_ids[1:], 0]
    assert batch.behaviour_logprobs[1:4].tolist() == item.logprobs.tolist()
    assert batch.advantages.tolist() == [0, 0.5, 0.5, 0.5, 0]
    assert batch.loss_weights.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4]


def test_arrays_are_the_same_after_the_way_to_a_rank():
    packed = pack_here(trajectories([(3, 40), (5, 70), (2, 9)]), ranks=2)
    for rank, arrived in enumerate(at_ranks(packed)):
        for there, here in zip(arrived, packed.microbatches(rank), strict=True):
            assert all(np.array_equal(getattr(there, name), getattr(here, name)) for name in FIELDS)


def test_a_rank_without_sequences_gets_a_token_that_teaches_nothing():
    packed = pack_here(trajectories([(2, 3)]), ranks=2)
    [one], [other] = packed.microbatches(0), packed.microbatches(1)
    assert sorted([one.num_tokens, other.num_tokens]) == [1, 5]
    assert float(one.loss_weights.sum() + other.loss_weights.sum()) == pytest.approx(1.0)


def test_sequence_mean_gives_every_response_the_same_weight():
    weights = StepWeights(aggregation=Aggregation.SEQUENCE_MEAN, num_trajectories=2, num_trained=100)
    sums = [float(weights.token_weights(item).sum()) for item in trajectories([(1, 10), (1, 90)])]
    assert sums == pytest.approx([0.5, 0.5])


def test_a_constant_length_leaves_every_token_its_weight_however_long_its_response_is():
    terms = StepWeights(aggregation=Aggregation.CONSTANT, num_trajectories=2, num_trained=100, constant=200)
    sums = [float(terms.token_weights(item).sum()) for item in trajectories([(1, 10), (1, 90)])]
    assert sums == pytest.approx([10 / 400, 90 / 400])


@pytest.mark.parametrize("aggregation", Aggregation)
def test_responses_left_out_for_want_of_signal_count_as_if_they_were_trained_on(aggregation):
    items = trajectories([(1, 10), (2, 30), (1, 20)])
    bins = [fit_bins(some, max_tokens=128) for some in (items, items[:1])]
    whole = step_weights(bins[0], aggregation=aggregation, constant=50)
    rest = step_weights(bins[1], tokens_without_signal=[30, 20], aggregation=aggregation, constant=50)
    assert rest.token_weights(items[0]).tolist() == whole.token_weights(items[0]).tolist()


def test_a_token_is_as_old_as_its_weights_or_the_cache_it_was_made_on():
    spans = (Span(5, 0, 2), Span(7, 2, 3), Span(7, 3, 4, kv_version=4))
    item = replace(make_trajectory("a", response=4), spans=spans)
    ages = {4: 4, 5: 3, 7: 1}
    assert StepWeights(aggregation=Aggregation.TOKEN_MEAN, num_trajectories=1, num_trained=4, ages=ages).staleness(
        item
    ).tolist() == [3, 3, 1, 4]


def test_advantages_over_the_deviation_of_the_step_have_that_of_one():
    items = [make_trajectory(f"a{i}", response=4, advantage=float(a)) for i, a in enumerate([5, -1, 3, 1])]
    bins = fit_bins(items, max_tokens=64)
    terms = step_weights(bins, aggregation=Aggregation.TOKEN_MEAN, normalises=True)
    found = [terms.advantages(item) for item in items]
    assert (np.mean(found), np.std(found)) == (pytest.approx(0.0, abs=1e-6), pytest.approx(1.0, rel=1e-3))


def test_a_step_is_normalised_over_its_tokens_as_published():
    """REINFORCE++, Hu et al. 2025, eq. 10, and OpenRLHF: returns of all trained tokens, each counting once."""
    given = {"a": [0.0, 1.0, 0.0, 2.0], "b": None, "c": [-1.0, 0.5]}
    items, returns = [], []
    for id, rewards in given.items():
        total = 2.5 if rewards is None else sum(rewards)
        item = make_trajectory(id, response=3 if rewards is None else len(rewards), advantage=total)
        if rewards is None:
            returns += [total] * 3
        else:
            item = replace(item, columns={TOKEN_REWARDS: token_values(np.array(rewards, np.float32))})
            returns += np.cumsum(rewards[::-1])[::-1].tolist()
        items.append(item)
    bins = fit_bins(items, max_tokens=64)
    terms = step_weights(bins, aggregation=Aggregation.TOKEN_MEAN, normalises=True)
    found = [terms.advantages(item) * np.ones(len(item.response_ids)) for item in items]
    returns = np.array(returns)
    expected = (returns - returns.mean()) / (returns.std() + 1e-4)
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-5, atol=1e-6)


def test_groups_of_equal_reward_are_in_the_mean_and_the_deviation_of_a_step():
    """Without them the mean of [1, 0, 1, 1] would be 0.5, and both answers would seem equally rare."""
    items = [
        make_trajectory(f"g{i // 2}.{i % 2}", response=4, advantage=float(a)) for i, a in enumerate([1, 0, 1, 1])
    ]
    bins = fit_bins(items, max_tokens=64)
    terms = step_weights(bins, aggregation=Aggregation.TOKEN_MEAN, normalises=True)
    found = [terms.advantages(item) for item in items]
    assert found == pytest.approx([0.577, -1.732, 0.577, 0.577], abs=1e-3)


def test_rewards_of_tokens_become_the_return_from_there_on():
    """Against the same baseline: what came before a token is no credit of it."""
    item = make_trajectory("a", prompt=2, response=4, advantage=1.5)
    rewards = token_values(np.array([0.0, 1.0, 0.0, 2.0], np.float32))
    item = replace(item, columns={TOKEN_REWARDS: rewards}, advantage_scale=0.5)
    [batch] = pack_here([item]).microbatches(0)
    assert batch.advantages.tolist() == [0, 1.5, 1.5, 1.0, 1.0, 0]


def test_a_column_stands_where_its_tokens_are_predicted_and_is_padded_elsewhere():
    hints = token_values(np.array([1, 2, 3], np.int32))
    item = replace(make_trajectory("a", prompt=2, response=3), columns={"hints": hints})
    bins = fit_bins([item], max_tokens=64)
    column = Column(name="hints", dtype=Dtype.INT32, padding=-1)
    terms = step_weights(bins, aggregation=Aggregation.TOKEN_MEAN, columns=[column])
    ranks = at_ranks(deal_to_ranks(bins, terms, max_tokens=64, ranks=2, attention_share=0.0))
    found, nothing = (batch.columns["hints"] for [batch] in ranks)
    assert (found.dtype, found.tolist(), nothing.tolist()) == (np.int32, [-1, 1, 2, 3, -1], [-1])


def test_experts_stand_at_the_tokens_that_were_routed():
    items = [make_trajectory("a", prompt=1, response=2), make_trajectory("b", prompt=2, response=2)]
    table = np.arange(3 * 2 * 2, dtype=np.uint8)  # all tokens but the last, 2 layers, 2 experts
    items[1] = replace(
        items[1], routed_experts=RoutedExperts(start=0, layers=2, top_k=2, width=1, data=table.tobytes())
    )
    [batch] = pack_here(items).microbatches(0)
    at = {length: start for start, length in zip(batch.cu_seqlens.tolist(), batch.lengths, strict=False)}
    assert (batch.experts[at[3] : at[3] + 3] == -1).all()
    assert batch.experts[at[4] : at[4] + 3].ravel().tolist() == table.tolist()
    assert (batch.experts[at[4] + 3] == -1).all()


def test_a_reweighted_trajectory_counts_less():
    items = [make_trajectory("a", weight=0.5, response=4), make_trajectory("b", response=4)]
    weights = StepWeights(aggregation=Aggregation.TOKEN_MEAN, num_trajectories=2, num_trained=8)
    assert [float(weights.token_weights(item).sum()) for item in items] == pytest.approx([0.25, 0.5])


def test_loss_mask_keeps_environment_tokens_out():
    item = make_trajectory("a", prompt=1, response=4, loss_mask=np.array([True, False, False, True]))
    [batch] = pack_here([item]).microbatches(0)
    assert batch.loss_weights.tolist() == pytest.approx([0.5, 0, 0, 0.5, 0])
