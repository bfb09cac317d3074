"""A turn that comes back to the embedded engine: what is computed again, what makes room, and what it changes."""

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.engines.local.kv import BLOCK
from laminar_py.engines.local.model import LocalModel
from laminar_py.engines.local.scheduler import Scheduler
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.engine import PauseMode
from laminar_py.records.pieces import Recording, join_experts
from laminar_py.records.trajectory import FinishReason
from tests.engines.engine_conformance import full_forward, make_request
from tests.engines.local.test_engine import VOCAB, save_model
from tests.engines.local.test_scheduler import make_scheduler, swap
from tests.engines.recording_conformance import own_choice

PROMPT = (np.arange(100) % 90).tolist()
SAYS = [7, 8, 9, 10, 11]  # of an environment, after each turn
STOP_IDS = tuple(range(0, VOCAB, 4))  # so that a turn of a model of random weights has a few tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [save_model(root / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture
def prefilled(monkeypatch):
    """Tokens of each batch of prefill, padding included."""
    found = []
    prefill = LocalModel.prefill

    def counting(self, ids, positions, *, attention):
        found.append(len(ids))
        return prefill(self, ids, positions, attention=attention)

    monkeypatch.setattr(LocalModel, "prefill", counting)
    return found


@dataclass
class Story:
    """A trajectory in the engine, turn by turn."""

    rid: str
    prompt: list[int] = field(default_factory=lambda: PROMPT)
    has_turns: bool = True
    sampling: dict = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    kv_versions: list[int | None] = field(default_factory=list)
    experts: list = field(default_factory=list)
    masks: list = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def routed(self):
        return sum(experts.positions for experts in self.experts)

    def request(self, *, stop_ids=STOP_IDS, length=1500):
        request = make_request(
            self.rid, prompt=self.prompt, prefix=self.ids, length=length, stop_ids=stop_ids, **self.sampling
        )
        return msgspec.structs.replace(request, has_turns=self.has_turns, routed=self.routed)

    def observe(self, ids=SAYS):
        self._add(ids, [0.0] * len(ids), is_sampled=False)

    def take(self, delta):
        self._add(delta.ids.tolist(), delta.logprobs.tolist(), is_sampled=True)
        self.kv_versions += [delta.kv_version] * len(delta.ids)
        self.reason = delta.finish_reason
        self.masks += [] if delta.sampling_mask is None else [delta.sampling_mask]
        self.experts += [] if delta.routed_experts is None else [delta.routed_experts]

    def _add(self, ids, logprobs, *, is_sampled):
        self.ids += ids
        self.logprobs += logprobs
        self.sampled += [is_sampled] * len(ids)

    def assert_full_forward(self, folder):
        exact = full_forward(folder, [*self.prompt, *self.ids], prompt=len(self.prompt))
        found = np.array(self.logprobs)
        np.testing.assert_allclose(found[self.sampled], exact[self.sampled], atol=1e-4)


def run(scheduler, *stories, **options):
    """One turn of each, all at once."""
    told = dict(enumerate(stories))
    for ticket, story in told.items():
        scheduler.add_request(ticket, story.request(**options))
    while scheduler.has_work:
        scheduler.step()
        for ticket, delta in scheduler.take_deltas():
            told[ticket].take(delta)


def begin(scheduler, *names, **options):
    """Trajectories that have had their first turn, and the environment's answer."""
    stories = [Story(name, prompt=[number + 1, *PROMPT], **options) for number, name in enumerate(names)]
    for story in stories:
        run(scheduler, story)
        assert story.reason is FinishReason.STOP
        story.observe()
    return stories


def test_a_turn_that_comes_back_prefills_only_what_is_new(folders, prefilled):
    scheduler = make_scheduler(folders[0])
    story = Story("a")
    for _ in range(5):
        run(scheduler, story)
        story.observe()
    # the token that ended a turn was never fed, the last one is decoded
    assert prefilled == [len(PROMPT) - 1, *[len(SAYS)] * 4]
    story.assert_full_forward(folders[0])


def test_what_cannot_come_back_is_not_kept(folders, prefilled):
    scheduler = make_scheduler(folders[0])
    [story] = begin(scheduler, "a", has_turns=False)
    prefilled.clear()
    run(scheduler, story)
    assert prefilled == [len(story.prompt) + story.sampled.index(False) + len(SAYS) - 1]


def test_only_the_end_of_a_turn_leaves_its_cache(folders, prefilled):
    scheduler = make_scheduler(folders[0])
    story = Story("a")
    run(scheduler, story, stop_ids=(), length=10)
    assert story.reason is FinishReason.LENGTH
    story.observe()
    prefilled.clear()
    run(scheduler, story)
    assert prefilled == [len(PROMPT) + 10 + len(SAYS) - 1]


def test_a_cache_that_begins_otherwise_is_not_used(folders, prefilled):
    scheduler = make_scheduler(folders[0])
    [story] = begin(scheduler, "a")
    other = Story("a", prompt=[99, *story.prompt[1:]], ids=story.ids.copy())
    prefilled.clear()
    run(scheduler, other)
    assert prefilled == [len(story.prompt) + len(story.ids) - 1]


def test_what_is_kept_counts_as_free(folders):
    scheduler = make_scheduler(folders[0])
    begin(scheduler, "a", "b")
    status = scheduler.status()
    assert (status.running, status.waiting, status.kv_used) == (0, 0, 0)


def room_for(blocks, folder, **options):
    """An engine of two slots whose cache has so many blocks, two of them for what slots do not fill."""
    return make_scheduler(folder, num_slots=2, max_len=5 * BLOCK, kv_capacity=(blocks - 2) * BLOCK, **options)


def test_what_was_kept_for_longest_makes_room_first(folders, prefilled):
    scheduler = room_for(13, folders[0])  # three times four blocks
    oldest, middle, newest = begin(scheduler, "oldest", "middle", "newest")
    run(scheduler, Story("other", prompt=[50] * 60, has_turns=False), length=1)
    prefilled.clear()
    for story in (newest, middle, oldest):
        run(scheduler, story)
    assert prefilled == [len(SAYS), len(SAYS), len(oldest.prompt) + oldest.sampled.index(False) + len(SAYS) - 1]


def test_what_is_kept_holds_up_nobody_and_takes_nobodys_room(folders):
    kept, empty = room_for(12, folders[0]), room_for(12, folders[0])
    begin(kept, "a", "b", "c")
    found = []
    for scheduler in (kept, empty):
        stories = [Story(f"s{seed}", prompt=[seed] * 30, has_turns=False) for seed in range(4)]
        for ticket, story in enumerate(stories):
            scheduler.add_request(ticket, story.request(stop_ids=(), length=100))
        steps = []
        while scheduler.has_work:
            scheduler.step()
            steps.append([ticket for ticket, delta in scheduler.take_deltas() for _ in delta.ids])
        found.append(steps)
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", list(PauseMode))
def test_nothing_of_older_weights_is_used(folders, prefilled, mode):
    scheduler = make_scheduler(folders[0])
    [story] = begin(scheduler, "a")
    swap(scheduler, folders[1], 2, mode)
    prefilled.clear()
    run(scheduler, story)
    second = len(story.sampled) - story.sampled[::-1].index(False)
    assert prefilled == [len(story.prompt) + second - 1]
    exact = full_forward(folders[1], [*story.prompt, *story.ids], prompt=len(story.prompt))
    np.testing.assert_allclose(story.logprobs[second:], exact[second:], atol=1e-4)


def test_a_turn_under_two_versions_leaves_nothing(folders, prefilled):
    scheduler = make_scheduler(folders[0])
    story = Story("a")
    scheduler.add_request(0, story.request())
    scheduler.step()
    swap(scheduler, folders[1], 2)
    while scheduler.has_work:
        scheduler.step()
    for _, delta in scheduler.take_deltas():
        story.take(delta)
    assert story.reason is FinishReason.STOP
    assert 1 in story.kv_versions
    story.observe()
    prefilled.clear()
    run(scheduler, story)
    assert sum(prefilled) > len(PROMPT)
    assert story.kv_versions[-1] is None


def test_new_weights_under_a_turn_that_came_back_are_told_with_its_tokens(folders):
    """Its cache has tokens of the weights before, which is what `in_place` says of any request."""
    scheduler = make_scheduler(folders[0])
    [story] = begin(scheduler, "a")
    story.observe(list(range(20, 90)) * 8)  # more than one batch of prefill
    scheduler.add_request(0, story.request())
    scheduler.step()
    swap(scheduler, folders[1], 2)
    told = len(story.kv_versions)
    while scheduler.has_work:
        scheduler.step()
    for _, delta in scheduler.take_deltas():
        story.take(delta)
    assert set(story.kv_versions[told:]) == {1}


def recording(folder, what):
    scheduler = Scheduler(
        ModelSpec.read(folder),
        num_slots=2,
        max_len=512,
        kv_capacity=1024,
        stream_interval=8,
        record=(what,),
    )
    scheduler.load_weights(folder, 1)
    return scheduler


def test_masks_are_those_of_an_engine_that_keeps_nothing(folders):
    found = []
    for has_turns in (True, False):
        scheduler = recording(folders[0], Recording.SAMPLING_MASK)
        sampling = {"temperature": 1.0, "top_k": 5, "seed": 3}
        [story] = begin(scheduler, "a", has_turns=has_turns, sampling=sampling)
        run(scheduler, story)
        found.append([(mask.counts.tolist(), mask.ids.tolist()) for mask in story.masks])
        assert sum(map(len, (mask.counts for mask in story.masks))) == sum(story.sampled)
    assert found[0] == found[1]


def test_experts_are_recorded_once_for_every_position_of_all_turns(tmp_path, prefilled):
    folder = save_model(tmp_path, "qwen3_moe")
    scheduler = recording(folder, Recording.ROUTED_EXPERTS)
    stories = begin(scheduler, "a", "b")
    for _ in range(2):
        run(scheduler, *stories)
        for story in stories:
            story.observe()
    run(scheduler, *stories)
    assert sum(prefilled[2:]) <= 3 * 2 * len(SAYS)
    for story in stories:
        found = join_experts(story.experts)
        assert (found.start, found.positions) == (0, len(story.prompt) + len(story.ids) - 1)
        expected = own_choice(folder, [*story.prompt, *story.ids])
        np.testing.assert_array_equal(np.sort(found.table, -1), expected)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.booleans()), min_size=2, max_size=8),
    st.integers(0, 2**31),
)
def test_turns_in_any_order_have_the_tokens_of_an_engine_that_keeps_nothing(folders, rounds, seed):
    """Of six that share room for four or so, some take a turn in each round, after which weights may be new."""
    found = []
    for has_turns in (True, False):
        scheduler, version = room_for(14, folders[0]), 1
        sampling = {"temperature": 1.0, "seed": seed}
        stories = [Story(f"s{n}", prompt=[n] * 20, has_turns=has_turns, sampling=sampling) for n in range(6)]
        for numbers, are_new in rounds:
            chosen = [stories[number] for number in sorted(numbers) if len(stories[number].ids) < 90]
            run(scheduler, *chosen, length=130)
            for story in chosen:
                story.observe()
            if are_new:
                version += 1
                swap(scheduler, folders[(version - 1) % 2], version)
        found.append(stories)
    for kept, computed in zip(*found, strict=True):
        assert kept.ids == computed.ids
        assert kept.logprobs == pytest.approx(computed.logprobs, abs=1e-5)
        assert kept.kv_versions == computed.kv_versions
