"""Where sequences lie in a row: whatever they share, every token is predicted from its own context, once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import laminar_py.learner.packing.layout as layout_module
from laminar_py.config.algorithm import Aggregation
from laminar_py.learner.packing.balance import bundle_size
from laminar_py.learner.packing.layout import LEAST_STEM, cut_tree, lay_out, row_size
from laminar_py.learner.packing.packer import StepWeights, microbatch
from laminar_py.records.pieces import RoutedExperts
from laminar_py.records.spans import NEW_CONVERSATION, Span, is_tree, sampled_mask
from tests.builders import make_mask, make_trajectory
from tests.depth import examples
from tests.records.test_spans import SPANS, tree_of

STEM = LEAST_STEM + 4  # tokens of a prompt that is worth sharing
BACK_TO_FIRST = [(4, 3, False, 0), (2, None, False, 0), (3, 3, False, 0), (1, 3, True, 15)]  # see `tree_of`


def weights_of(bundle):
    return StepWeights(
        aggregation=Aggregation.TOKEN_MEAN,
        num_trajectories=len(bundle),
        num_trained=sum(item.num_trained for item in bundle),
        groups=tuple(sorted({item.group_id for item in bundle})),
    )


def contexts(batch):
    """The tokens that the model sees at each row, the row's own last."""
    rows, seen = batch.key_rows
    found, start = [], 0
    for count, length in zip(seen, batch.lengths, strict=True):
        keys = rows[start : start + count]
        found += [batch.input_ids[keys[: count - length + 1 + place]].tolist() for place in range(length)]
        start += count
    return found


def expected(item):
    """(context, token) of every response token that has a context, by its place."""
    if not is_tree(item.spans):
        whole = [*item.prompt_ids.tolist(), *item.response_ids.tolist()]
        first = len(item.prompt_ids)
        return {place: (whole[: first + place], whole[first + place]) for place in range(len(item.response_ids))}
    found = {}
    for path in item.token_paths:
        before = item.prompt_ids.tolist() if path.has_prompt else []
        whole = [*before, *item.response_ids[path.places].tolist()]
        for index, (place, own) in enumerate(zip(path.places.tolist(), path.own.tolist(), strict=True)):
            at = len(before) + index
            if own and at:
                found[place] = (whole[:at], whole[at])
    return found


def check(bundle):
    layout, batch = lay_out(bundle), microbatch(bundle, weights_of(bundle))
    seen = contexts(batch)
    assert [len(context) - 1 for context in seen] == batch.position_ids.tolist()
    rows = np.concatenate([placed.rows for placed in layout.placed])
    assert len(set(rows.tolist())) == len(rows), "a row predicts two tokens"
    for item, placed in zip(bundle, layout.placed, strict=True):
        assert (np.diff(placed.rows) > 0).all()
        found = {
            place: (seen[row], int(batch.labels[row]))
            for row, place in zip(placed.rows.tolist(), placed.places.tolist(), strict=True)
        }
        assert found == expected(item)
    return batch


def group(count, prompt, responses, *, seed=0, name="g0"):
    """Samples of one prompt."""
    made = [make_trajectory(f"{name}.{k}", prompt=prompt, response=length) for k, length in enumerate(responses)]
    rng = np.random.default_rng(seed)
    ids = rng.integers(2, 50, prompt).astype(np.int32)
    return [
        replace(item, group_id=name, prompt_ids=ids, response_ids=rng.integers(2, 50, length).astype(np.int32))
        for item, length in zip(made[:count], responses, strict=True)
    ]


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.integers(0, 30), min_size=1, max_size=5)), min_size=1, max_size=4
    ),
    st.randoms(use_true_random=False),
)
def test_each_token_of_a_sample_is_predicted_once_from_its_own_context(groups, shuffle):
    bundle = [
        item
        for place, (prompt, responses) in enumerate(groups)
        for item in group(len(responses), prompt, responses, seed=place, name=f"g{place}")
    ]
    shuffle.shuffle(bundle)
    check(bundle)


def tree(drawn, *, prompt=STEM, seed=0):
    """A trajectory whose response is a tree; a mask of it keeps what was sampled."""
    spans = tree_of([(length * 7, *others) for length, *others in drawn])
    length = spans[-1].end if spans else 0
    item = make_trajectory(f"t{seed}.0", prompt=prompt, response=length, seed=seed)
    return replace(item, spans=spans, loss_mask=sampled_mask(spans, length))


@settings(max_examples=examples(100), deadline=None)
@given(SPANS, SPANS, st.sampled_from([1, STEM]))
def test_each_token_of_a_tree_is_predicted_once_from_its_own_context(first, second, prompt):
    one, other = (with_mask(tree(drawn, prompt=prompt, seed=seed)) for seed, drawn in enumerate((first, second)))
    other = replace(other, prompt_ids=one.prompt_ids, group_id=one.group_id)
    bundle = [one, other, make_trajectory("p.0", prompt=3)]
    batch = check(bundle)
    check_masks(batch)
    size = bundle_size(bundle)
    assert batch.num_tokens <= size.tokens, "a bin counts no less than its row has"
    assert size.tokens <= sum(row_size(item).tokens for item in bundle)


def test_trees_of_one_prompt_share_it():
    """Three samples of a prompt of 20 tokens; two of them go back to their first turn."""
    first, second = (with_mask(tree(BACK_TO_FIRST, seed=seed)) for seed in (0, 1))
    bundle = [replace(item, prompt_ids=first.prompt_ids, group_id="g0") for item in (first, second)]
    bundle += [replace(item, prompt_ids=first.prompt_ids) for item in group(1, STEM, [9])]
    alone = [row_size(item) for item in bundle]
    batch = check(bundle)
    assert batch.num_tokens == bundle_size(bundle).tokens == sum(size.tokens for size in alone) - 2 * (STEM - 1)
    assert (
        batch.squares == bundle_size(bundle).squares == sum(size.squares for size in alone) - 2 * (STEM - 1) ** 2
    )


@settings(max_examples=examples(100), deadline=None)
@given(SPANS, st.sampled_from([1, STEM]), st.floats(0, 1))
def test_a_tree_that_is_cut_has_each_token_once_in_rows_of_bounded_size(drawn, prompt, room):
    item = with_mask(tree(drawn, prompt=prompt))
    longest, whole = max(path.num_tokens(prompt) for path in item.token_paths), row_size(item).tokens
    most = longest + round(room * (whole - longest))
    parts = cut_tree(item, most)
    assert len(parts) == 1 or whole > most
    assert sum(part.is_first_part for part in parts) == 1
    found = [check_masks(check([part])) or lay_out([part]) for part in parts]
    assert all(len(layout.ids) == row_size(part).tokens <= most for layout, part in zip(found, parts, strict=True))
    trained = np.concatenate([layout.placed[0].places for layout in found])
    assert sorted(trained.tolist()) == sorted(lay_out([item]).placed[0].places.tolist())


def test_a_tree_is_cut_where_it_branches_last():
    """Turns of 700 tokens: two ends of one branch, then two of another."""
    spans = (
        *(Span(3, 0, 700), Span(3, 700, 1400), Span(3, 1400, 2100, follows=700)),
        *(Span(3, 2100, 2800, follows=NEW_CONVERSATION), Span(3, 2800, 3500, follows=2450)),
    )
    item = replace(make_trajectory("t.0", prompt=STEM, response=3500), spans=spans)
    assert [part.sequences for part in cut_tree(item, 2200)] == [(0, 1), (2, 3)]
    assert sorted(part.sequences for part in cut_tree(item, 1500)) == [(0,), (1,), (2, 3)]


def test_a_run_that_one_sequence_owns_keeps_its_sequences_together():
    """The first two leaves share 2,000 tokens, of which the first owns all; the third shares 1,000."""
    spans = (Span(3, 0, 1000), Span(3, 1000, 2000, follows=1000), Span(3, 2000, 2100, follows=2000))
    spans += (Span(3, 2100, 2200, follows=2000), Span(3, 2200, 3200, follows=1000))
    item = replace(make_trajectory("t.0", prompt=STEM, response=3200), spans=spans)
    assert [part.sequences for part in cut_tree(item, 2300)] == [(0, 1), (2,)]


def side_questions(turns, *, at_once=True):
    """A conversation of long turns, with a short side question behind each, asked at once or at the end."""
    spans, end, asked = [], 0, []
    for turn in range(turns):
        start = spans[-1].end if spans else 0
        spans.append(Span(3, start, start + 1000, follows=end if turn else None))
        end = start + 1000
        asked.append(end)
        if at_once:
            spans.append(Span(3, end, end + 200, follows=asked.pop()))
    for last in asked:
        spans.append(Span(3, spans[-1].end, spans[-1].end + 200, follows=last))
    return replace(make_trajectory("t.0", prompt=100, response=turns * 1200), spans=tuple(spans))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_conversation_with_side_questions_is_repeated_in_part_alone(at_once):
    item = side_questions(30, at_once=at_once)
    parts = cut_tree(item, 34_000)
    assert len(parts) == 2
    assert sum(row_size(part).tokens for part in parts) < 1.4 * row_size(item).tokens


def test_a_tree_is_cut_without_a_look_at_all_leaves_for_each(monkeypatch):
    """201 leaves: both the tree and most of its sequences are longer than a row."""
    item, looked, size = side_questions(201), [], layout_module._size
    monkeypatch.setattr(layout_module, "_size", lambda leaves: looked.append(len(leaves)) or size(leaves))
    for most in (20_000, 202_000, 235_000):
        looked.clear()
        parts = cut_tree(item, most)
        assert sorted(place for part in parts for place in part.sequences) == list(range(201))
        assert sum(looked) <= 5 * 201


def test_a_prompt_that_samples_share_is_there_once():
    bundle = group(4, STEM, [5, 6, 7, 8])
    batch = check(bundle)
    assert batch.num_tokens == STEM - 1 + 4 + 26, "the prompt's last token begins each response"
    assert batch.parents.tolist() == [-1, 0, 0, 0, 0]
    whole = sum((STEM + length) ** 2 for length in (5, 6, 7, 8))
    assert batch.squares == whole - 3 * (STEM - 1) ** 2


def test_a_short_prompt_is_repeated():
    batch = check(group(3, LEAST_STEM, [5, 6, 7]))
    assert batch.parents is None
    assert batch.num_tokens == 3 * LEAST_STEM + 18


def with_mask(item):
    return replace(item, sampling_mask=make_mask(item.response_ids))


def check_masks(batch):
    """Each row that predicts a token has this token in its mask."""
    if batch.support is None:
        return
    ends = np.cumsum(batch.support.counts)
    for row in np.flatnonzero(batch.support.counts):
        ids = batch.support.ids[ends[row] - batch.support.counts[row] : ends[row]]
        assert batch.labels[row] in ids


def test_masks_come_in_the_order_of_rows():
    first, second = (group(2, STEM, [5, 3], seed=seed, name=f"g{seed}") for seed in (0, 1))
    check_masks(check([with_mask(item) for item in (first[0], second[0], first[1])]))


@pytest.mark.parametrize("parts_at", [0, 7, STEM - 2, STEM - 1, None])
def test_prompts_part_where_recorded_experts_differ(parts_at):
    bundle, table = group(2, STEM, [4, 4]), np.zeros((STEM + 3, 2, 2), np.uint8)
    tables = [table, table.copy()]
    if parts_at is not None:
        tables[1][parts_at:] = 1
    bundle = [
        replace(item, routed_experts=RoutedExperts(start=0, layers=2, top_k=2, width=1, data=one.tobytes()))
        for item, one in zip(bundle, tables, strict=True)
    ]
    batch = check(bundle)
    shared = STEM if parts_at is None else parts_at
    assert batch.num_tokens == 2 * (STEM + 4) - (shared - 1 if shared > LEAST_STEM else 0)
    rows = {place: place for place in range(shared - 1)} if shared > LEAST_STEM else {}
    assert all((batch.experts[row] == 0).all() for row in rows.values())
    assert ((batch.experts == 1).any()) == (parts_at is not None)
