"""Trajectories get back exactly the tokens that they were stored with, or say what is lost."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from laminar_py.ledger.segments.reader import PayloadReader, complete_all
from laminar_py.ledger.segments.writer import SEGMENT, SegmentWriter
from laminar_py.records.columns import REFERENCE_LOGPROBS, TOKEN_REWARDS, token_values
from laminar_py.records.spans import Span
from tests.builders import make_experts, make_mask, make_trajectory
from tests.depth import examples
from tests.stored import assert_alike, store, store_all

ONCE = settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
SHAPES = st.tuples(st.integers(1, 30), st.sets(st.integers(1, 29), max_size=4))  # response tokens, cuts


def complete(finished, folder, **kwargs):
    reader = PayloadReader(folder)
    try:
        return complete_all(finished, reader, **kwargs)
    finally:
        reader.close()


def recorded(id, *, response, versions=(0,), **kwargs):
    """A trajectory with columns and everything that engines record, of these versions one after the other."""
    item = make_trajectory(id, response=response, **kwargs)
    bounds = [response * place // len(versions) for place in range(len(versions) + 1)]
    return replace(
        item,
        spans=tuple(Span(v, a, b) for v, a, b in zip(versions, bounds, bounds[1:], strict=False) if a < b),
        sampling_mask=make_mask(item.response_ids),
        routed_experts=make_experts(0, item.num_tokens - 1),
        columns={
            TOKEN_REWARDS: token_values(np.arange(response, dtype=np.float32)),
            "hints": token_values(np.arange(response, dtype=np.int32)),
        },
    )


@ONCE
@given(shapes=st.lists(SHAPES, min_size=1, max_size=6))
def test_tokens_columns_masks_and_experts_come_back_however_a_response_is_cut_into_pieces(shapes, tmp_path):
    writer, items, finished = SegmentWriter(tmp_path, "replica-0"), [], []
    for index, (response, cuts) in enumerate(shapes):
        items.append(recorded(f"g{index}.0", response=response, versions=(3, 4), seed=index))
        finished.append(store(items[-1], writer, cuts=sorted(cut for cut in cuts if cut < response)))
    found, lost = complete(finished, tmp_path)
    assert lost == {}
    for item in items:
        assert_alike(found[item.id], item)


def test_decisions_and_tokens_tell_the_same_of_a_trajectory(tmp_path):
    item = recorded("g0.0", response=7, versions=(5, 2))
    [finished] = store_all([item], tmp_path, cuts=[3])
    for name in ("num_tokens", "num_trained", "oldest_version", "earned"):
        assert getattr(finished, name) == getattr(item, name), name
    assert (finished.length, len(finished.refs)) == (7, 4)


def test_one_whose_bytes_were_changed_is_lost_by_name_and_the_others_are_complete(tmp_path):
    items = [recorded(f"g{index}.0", response=9, seed=index) for index in range(3)]
    finished = store_all(items, tmp_path, cuts=[4])
    [segment] = tmp_path.glob(f"*{SEGMENT}")
    data = bytearray(segment.read_bytes())
    data[finished[1].tokens[1].at.offset + 60] ^= 1
    segment.write_bytes(data)
    found, lost = complete(finished, tmp_path)
    assert list(found) == ["g0.0", "g2.0"]
    assert list(lost) == ["g1.0"]
    assert "the stored bytes differ from the digest" in lost["g1.0"]
    for item in (items[0], items[2]):
        assert_alike(found[item.id], item)


def test_one_whose_column_is_lost_is_lost_whole(tmp_path):
    here, columns = SegmentWriter(tmp_path, "replica-0"), SegmentWriter(tmp_path, "reference")
    kept, other = make_trajectory("g0.0"), make_trajectory("g1.0")
    finished = [store(item, here) for item in (kept, other)]
    scored = replace(other, columns={REFERENCE_LOGPROBS: token_values(np.zeros(5, np.float32))})
    finished[1] = replace(finished[1], columns=store(scored, columns).columns)
    next(tmp_path.glob("reference*")).unlink()
    found, lost = complete(finished, tmp_path)
    assert list(found) == ["g0.0"]
    assert "No such file" in lost["g1.0"]


@pytest.mark.parametrize(("left_out", "says"), [(0, "missing"), (1, "missing"), (2, "6 of its 9 tokens")])
def test_a_piece_that_no_reference_tells_of_is_a_loss_and_never_a_shorter_response(left_out, says, tmp_path):
    [whole] = store_all([make_trajectory("g0.0", response=9)], tmp_path, cuts=[3, 6])
    rest = tuple(ref for place, ref in enumerate(whole.tokens) if place != left_out)
    if left_out == 2:
        rest = (*rest[:-1], replace(rest[-1], end=9))
    found, lost = complete([replace(whole, tokens=rest)], tmp_path)
    assert (found, list(lost)) == ({}, ["g0.0"])
    assert says in lost["g0.0"]


def test_nothing_is_learned_of_one_that_is_masked(tmp_path):
    masked, trained = store_all([make_trajectory("g0.0"), make_trajectory("g1.0")], tmp_path)
    found, _ = complete([replace(masked, num_trained=0), trained], tmp_path)
    assert found["g0.0"].loss_mask.tolist() == [False] * 5
    assert found["g1.0"].loss_mask.tolist() == [True] * 5
    assert [found[id].num_trained for id in ("g0.0", "g1.0")] == [0, 5]


def test_what_a_decision_changed_after_storage_is_in_the_complete_one(tmp_path):
    [stored] = store_all([make_trajectory("g0.0")], tmp_path)
    found, _ = complete([replace(stored, weight=0.25, advantage=-2.0, advantage_scale=0.5, reward=3.0)], tmp_path)
    one = found["g0.0"]
    assert (one.weight, one.advantage, one.advantage_scale, one.reward) == (0.25, -2.0, 0.5, 3.0)
