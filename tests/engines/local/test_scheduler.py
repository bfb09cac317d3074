"""What the embedded engine decides between steps, and where it keeps the KV cache."""

from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.engines.local import sampling
from laminar_py.engines.local.kv import BLOCK, BlockPool
from laminar_py.engines.local.prefill import PREFILL_TOKENS
from laminar_py.engines.local.sampling import Sampler, hash_seeds, is_near, uniforms
from laminar_py.engines.local.scheduler import Scheduler
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.engine import PauseMode
from tests.depth import examples
from tests.engines.engine_conformance import make_request
from tests.engines.local.test_engine import save_model

SPEC = ModelSpec(
    num_layers=2,
    hidden=8,
    intermediate=8,
    vocab=10,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    eps=1e-6,
    rope_theta=1e4,
    qk_norm=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    tied=False,
    dtype=torch.float32,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def make_scheduler(folder, *, num_slots=4, max_len=2048, kv_capacity=None):
    scheduler = Scheduler(
        ModelSpec.read(folder),
        num_slots=num_slots,
        max_len=max_len,
        kv_capacity=kv_capacity or num_slots * max_len,
        stream_interval=1,
    )
    scheduler.load_weights(folder, 1)
    return scheduler


def steps_until_done(scheduler) -> list[list[int]]:
    """Tickets that got a token in each step."""
    steps = []
    while scheduler.has_work:
        scheduler.step()
        steps.append([ticket for ticket, delta in scheduler.take_deltas() for _ in delta.ids])
    return steps


def responses(scheduler) -> dict[int, list[int]]:
    """All tokens of each ticket."""
    tokens: dict[int, list[int]] = {}
    while True:
        for ticket, delta in scheduler.take_deltas():
            tokens.setdefault(ticket, []).extend(delta.ids.tolist())
        if not scheduler.has_work:
            return tokens
        scheduler.step()


def test_a_long_prompt_holds_up_no_running_request(folder):
    scheduler = make_scheduler(folder)
    scheduler.add_request(0, make_request("short", length=10))
    scheduler.step()
    scheduler.add_request(1, make_request("long", prompt=np.arange(1800) % 100, length=1))
    steps = steps_until_done(scheduler)
    assert all(0 in tickets for tickets in steps[:9])
    assert 1 in steps[1799 // PREFILL_TOKENS]


def test_the_oldest_request_never_makes_room_for_others(folder):
    scheduler = make_scheduler(folder, num_slots=8, max_len=256, kv_capacity=256)
    for ticket in range(8):
        scheduler.add_request(ticket, make_request(f"r{ticket}", prompt=[ticket] * 20, length=100))
    steps = steps_until_done(scheduler)
    assert all(0 in tickets for tickets in steps[:100])
    assert sorted(ticket for tickets in steps for ticket in tickets) == sorted(list(range(8)) * 100)


def test_a_sibling_takes_over_a_prefill_whose_first_request_is_aborted(folder):
    prompt = np.arange(1500) % 100
    orphaned, plain = make_scheduler(folder), make_scheduler(folder)
    for ticket in range(2):
        orphaned.add_request(ticket, make_request(f"r{ticket}", group="g", prompt=prompt))
    orphaned.step()
    orphaned.abort(0)
    plain.add_request(1, make_request(prompt=prompt))
    assert responses(orphaned) == {0: [], 1: responses(plain)[1]}
    assert orphaned.status().kv_used == 0


def swap(scheduler, folder, version, mode=PauseMode.IN_PLACE) -> None:
    """New weights between two steps."""
    scheduler.pause(mode)
    scheduler.load_weights(folder, version)
    scheduler.resume()


def stamps(scheduler) -> dict[int, list[tuple[int, int | None]]]:
    """Version and version of the KV cache of all tokens that are to come, by ticket."""
    found: dict[int, list[tuple[int, int | None]]] = {}
    scheduler.take_deltas()
    while scheduler.has_work:
        scheduler.step()
        for ticket, delta in scheduler.take_deltas():
            found.setdefault(ticket, []).extend([(delta.version, delta.kv_version)] * len(delta.ids))
    return found


def test_tokens_name_the_oldest_weights_in_their_cache(folder):
    scheduler = make_scheduler(folder)
    scheduler.add_request(0, make_request(length=10))
    scheduler.step()
    for version in (2, 5):
        swap(scheduler, folder, version)
        scheduler.step()
    scheduler.add_request(1, make_request("late", length=2))
    assert stamps(scheduler) == {0: [(5, 1)] * 7, 1: [(5, None)] * 2}


def test_a_retraction_leaves_nothing_of_older_weights(folder):
    scheduler = make_scheduler(folder)
    scheduler.add_request(0, make_request(length=10))
    scheduler.step()
    swap(scheduler, folder, 2)
    scheduler.step()
    swap(scheduler, folder, 2, PauseMode.RETRACT)
    assert stamps(scheduler) == {0: [(2, None)] * 8}


def test_the_cache_is_as_old_as_the_first_chunk_of_its_prefill(folder):
    """At a swap one long prompt is half computed, with a sibling that waits for it, and another is not begun."""
    scheduler = make_scheduler(folder)
    begun, queued = (np.arange(1000) % 100 + offset for offset in (0, 1))
    scheduler.add_request(0, make_request("begun", group="g", prompt=begun, length=2))
    scheduler.add_request(1, make_request("sibling", group="g", prompt=begun, length=2))
    scheduler.add_request(2, make_request("queued", prompt=queued, length=2))
    scheduler.step()
    swap(scheduler, folder, 2)
    scheduler.add_request(3, make_request("late sibling", group="g", prompt=begun, length=2))
    old, new = [(2, 1)] * 2, [(2, None)] * 2
    assert stamps(scheduler) == {0: old, 1: old, 2: new, 3: new}


def test_a_prefill_that_begins_anew_is_of_the_new_weights(folder):
    scheduler = make_scheduler(folder)
    for ticket in range(2):
        scheduler.add_request(
            ticket, make_request(f"r{ticket}", group="g", prompt=np.arange(1000) % 100, length=2)
        )
    scheduler.step()
    swap(scheduler, folder, 2)
    scheduler.abort(0)
    assert stamps(scheduler) == {1: [(2, None)] * 2}


blocks_of = st.integers(1, 3 * BLOCK)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 3), blocks_of),
        st.tuples(st.just("share"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("release"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("keep"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("restore"), st.integers(0, 3), st.integers(0, 24)),
    ),
    max_size=25,
)


@dataclass
class Pool:
    """A pool, and what stands in the blocks of its slots and of what it keeps: a mark of each block."""

    pool: BlockPool
    held: dict[int, list[float]]
    kept: dict[str, list[float]] = field(default_factory=dict)  # the longest kept first

    def extend(self, slot, length, step):
        self.pool.extend(slot, length)
        for place in range(len(self.held[slot]), -(-length // BLOCK)):
            self.held[slot].append(float(100 * step + place + 1))
            self.pool.keys[:, self.pool.table[slot, place]] = self.held[slot][place]
        while sum(map(len, [*self.held.values(), *self.kept.values()])) > len(self.pool.owner):
            del self.kept[next(iter(self.kept))]

    def release(self, slot, _, step):
        self.pool.release(slot)
        self.held[slot] = []

    def share(self, slot, target, step):
        if self.held[slot] and not self.held[target]:
            self.extend(target, len(self.held[slot]) * BLOCK, step)
            self.pool.release(target)
            self.pool.share(slot, target, len(self.held[slot]) * BLOCK)
            self.held[target] = list(self.held[slot])

    def keep(self, slot, _, step):
        if self.held[slot]:
            self.pool.keep(slot, str(step), np.full(len(self.held[slot]) * BLOCK, step, np.int32))
            self.kept[str(step)], self.held[slot] = self.held[slot], []

    def restore(self, slot, number, step):
        if not self.held[slot]:
            self.held[slot] = self.kept.pop(str(number), [])
            ids = np.full(3 * BLOCK, number, np.int32)
            assert self.pool.restore(slot, str(number), ids) == len(self.held[slot]) * BLOCK


@settings(max_examples=examples(200), deadline=None)
@given(actions)
def test_blocks_in_use_stay_dense_and_what_is_held_or_kept_has_its_tokens(actions):
    pool = BlockPool(SPEC, num_slots=4, max_len=3 * BLOCK, kv_capacity=8 * BLOCK)
    model = Pool(pool, {slot: [] for slot in range(4)})
    for step, (action, slot, value) in enumerate(actions):
        getattr(model, action)(slot, value, step)
        pool.compact()
        assert pool.num_blocks == sum(map(len, model.held.values()))
        for owner, marks in model.held.items():
            blocks = pool.table[owner, : len(marks)]
            assert pool.keys[1, blocks, 0, 0, 0].tolist() == marks
            assert (blocks < pool.num_blocks).all()
    for rid in list(model.kept):
        model.release(0, 0, 0)
        model.restore(0, int(rid), 0)
        pool.compact()
        assert pool.keys[1, pool.table[0, : len(model.held[0])], 0, 0, 0].tolist() == model.held[0]


def draw(logits, uniform, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, recorded=False):
    """A token of each row, with the same settings on all rows of `logits [B, V]`."""
    rows = len(logits)
    sampler = Sampler.build(
        np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k),
        top_p=np.full(rows, top_p, np.float32),
        min_p=np.full(rows, min_p, np.float32),
    )
    return sampler.draw(logits, uniform, recorded=recorded)


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -torch.inf])
    numbers = torch.from_numpy(
        uniforms(hash_seeds(np.arange(40_000, dtype=np.uint64)), np.zeros(40_000, np.int64))
    )
    drawn = draw(logits.expand(40_000, -1), numbers)
    shares = torch.bincount(drawn.ids, minlength=5) / 40_000
    assert shares.tolist() == pytest.approx(torch.softmax(logits, -1).tolist(), abs=0.01)
    assert torch.equal(drawn.logprobs, torch.log_softmax(logits, -1)[drawn.ids])


@given(
    logits=st.lists(st.floats(-4, 4), min_size=2, max_size=6),
    number=st.integers(0, 2**23 - 1),
    top_k=st.integers(0, 3),
)
def test_a_number_near_a_boundary_between_two_tokens_is_found(logits, number, top_k):
    uniform, rows = np.array([number * 2.0**-23], np.float32), torch.tensor([logits])
    sampler = Sampler.build(
        np.ones(1, np.float32),
        top_k=np.array([top_k]),
        top_p=np.ones(1, np.float32),
        min_p=np.zeros(1, np.float32),
    )
    drawn = sampler.draw(rows, torch.from_numpy(uniform), with_edges=True)
    order = np.argsort(-rows[0].numpy(), kind="stable")[: top_k or None]
    probabilities = np.zeros(len(logits))
    probabilities[order] = np.exp(rows[0].double().numpy()[order])
    edges = (probabilities / probabilities.sum()).cumsum()
    inner = [edge for edge in edges if 1e-6 < edge < 1 - 1e-6]
    distance = min((abs(edge - uniform[0]) for edge in inner), default=1.0)
    with patch.object(sampling, "NEAR", near := 0.01):
        found = is_near(drawn.edges.numpy(), uniform)
    if abs(distance - near) > 1e-5:
        assert found.tolist() == [distance < near]


CUTS = [
    ({"top_k": 2}, {0, 3}),
    ({"top_p": 0.6}, {0}),
    ({"top_p": 0.7}, {0, 3}),
    ({"top_k": 1}, {0}),
    ({"min_p": 0.3}, {0, 3}),
    ({"min_p": 0.1, "top_k": 3}, {0, 1, 3}),
]


@pytest.mark.parametrize(("settings", "kept"), CUTS)
def test_a_cut_bounds_the_draw_and_leaves_logprobs_whole(settings, kept):
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])  # probabilities .64 .09 .03 .24
    numbers = torch.linspace(0, 1 - 2**-23, 1000)
    drawn = draw(logits.expand(1000, -1), numbers, **settings)
    assert set(drawn.ids.tolist()) == kept
    assert drawn.mask is None
    assert torch.equal(drawn.logprobs, torch.log_softmax(logits, -1)[drawn.ids])


@pytest.mark.parametrize(("settings", "kept"), CUTS)
def test_a_recorded_cut_names_what_is_kept_and_has_its_logprobs(settings, kept):
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    drawn = draw(logits.expand(1000, -1), torch.linspace(0, 1 - 2**-23, 1000), recorded=True, **settings)
    assert drawn.mask.counts.tolist() == [len(kept)] * 1000
    assert drawn.mask.ids.tolist() == sorted(kept) * 1000
    outside = torch.tensor([token not in kept for token in range(4)])
    expected = torch.log_softmax(logits.masked_fill(outside, -torch.inf), -1)
    torch.testing.assert_close(drawn.logprobs, expected[drawn.ids])


def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one():
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    drawn = draw(logits, torch.full((50,), 0.999), temperature=0.0)
    ids, logprobs = drawn.ids, drawn.logprobs
    assert torch.equal(ids, logits.argmax(-1))
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1).max(-1).values)


def test_neighbouring_seeds_and_positions_give_unrelated_numbers():
    seeds = hash_seeds(np.repeat(np.arange(200, dtype=np.uint64), 200))
    numbers = uniforms(seeds, np.tile(np.arange(200), 200)).reshape(200, 200)
    assert 0 <= numbers.min() < 1e-3 < 0.999 < numbers.max() < 1
    assert np.unique(numbers).size > 39_000
    for one, other in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02
