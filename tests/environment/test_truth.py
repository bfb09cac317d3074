"""Ten thousand turns, held against what the engine itself wrote down: what is trained on is what was sampled.

A real engine, replica, host, segments and packer, over a tokenizer that merges wherever two texts touch.
"""

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest

from laminar_py.config.algorithm import Aggregation
from laminar_py.config.rollout import OnNewWeights
from laminar_py.engines.local.engine import LocalEngine
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.packing.packer import Packed
from laminar_py.learner.packing.packer import pack as pack_step
from laminar_py.ledger.segments.reader import PayloadReader, complete_one
from laminar_py.records.engine import Delta, SamplingParams
from laminar_py.records.host import SystemClock
from laminar_py.records.spans import Span, is_tree, num_sampled, num_turns, replace_spans
from laminar_py.records.trajectory import FinishReason, Kind, TrajectoryRef
from laminar_py.rollout.replica import Replica
from laminar_py.rollout.storing import SegmentStore
from tests.depth import examples
from tests.environment.turns import Chatter, Wanderer, greedy_tokenizer, make_host, problem
from tests.events import make_assignment
from tests.learner.builders import make_learner, make_model_folder
from tests.rollout.folders import Folders

TURNS, TRAJECTORIES = 10, examples(1_000)
STOP_IDS = tuple(range(16))  # so that a turn of a model of random weights has few tokens
LABELS = count()


class LoggedEngine:
    """An engine that writes to a file of its own what it has sampled, before anybody else has it."""

    def __init__(self, engine, path):
        self._engine = engine
        self._file = path.open("a")

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, request):
        async for delta in self._engine.generate(request):
            self._log(delta)
            yield delta

    def follow(self, request, hear):
        def heard(news):
            if isinstance(news, Delta):
                self._log(news)
            hear(news)

        self._engine.follow(request, heard)

    def _log(self, delta):
        line = (delta.rid, delta.ids.tolist(), delta.logprobs.tolist(), delta.version)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class HereEnvironments:
    """A host in this process, which answers turns from `holds_at` on once `go` is set."""

    def __init__(self, host, *, holds_at=None):
        self._host, self._holds_at = host, holds_at
        self.go = asyncio.Event()

    async def answer(self, turn):
        if num_turns(turn.spans) == self._holds_at:
            await self.go.wait()
        return await self._host.answer(turn)

    async def forget(self, trajectory_id):
        self._host.forget([trajectory_id])


@dataclass
class Told:
    """What a replica reported of a trajectory."""

    tokens: tuple = ()
    spans: tuple[Span, ...] = ()
    end: FinishReason | None = None
    environment_s: float = 0.0

    def take(self, progress):
        self.tokens += () if progress.tokens is None else (progress.tokens,)
        self.spans = replace_spans(self.spans, progress.spans)
        self.end = progress.finish_reason
        self.environment_s += progress.environment_s


@dataclass
class Story:
    """A replica, what it told, and what its engine wrote down."""

    replica: Replica
    segments: object
    log: object
    weights: Folders
    environments: HereEnvironments
    told: dict = field(default_factory=lambda: defaultdict(Told))

    async def lead(self, names, *, turns, length, publishes):
        while not (await self.replica.next_report(0.2)).admissible:
            pass
        self.replica.start_assignments([assignment(name, turns=turns, length=length) for name in names])
        while not all(self.told[name].end for name in names):
            report = await self.replica.next_report(0.2)
            for progress in report.progress:
                assert progress.failure is None, progress.detail
                self.told[progress.trajectory_id].take(progress)
            if publishes and any(num_sampled(told.spans) for told in self.told.values()):
                await self.weights.publish(1)
                publishes = False
            if 1 in [one.version for one in report.loads]:
                self.environments.go.set()

    def trajectories(self):
        reader = PayloadReader(self.segments)
        return [complete_one(finished(name, told), load(reader, told)) for name, told in self.told.items()]

    def sampled(self):
        """Ids and log-probabilities of each trajectory, by the engine's own file."""
        found = defaultdict(lambda: ([], []))
        for line in self.log.read_text().splitlines():
            rid, ids, logprobs, _ = json.loads(line)
            found[rid][0].extend(ids)
            found[rid][1].extend(logprobs)
        return found


def load(reader, told):
    return reader.load(one.at for one in told.tokens)


def finished(name, told):
    return TrajectoryRef(
        id=name,
        prompt_id=name,
        group_id=name.partition(".")[0],
        sample_index=0,
        kind=Kind.TRAIN,
        prompt_ids=np.array([1, 2], np.int32),
        tokens=told.tokens,
        num_trained=num_sampled(told.spans),
        spans=told.spans,
        finish_reason=told.end,
        reward=1.0,
        advantage=1.0 - 2.0 * (hash(name) % 2),
    )


def assignment(name, *, turns, length):
    return make_assignment(
        name,
        group_id=name,
        prompt_ids=np.array([1, 2], np.int32),
        sampling=SamplingParams(max_new_tokens=length, stop_ids=STOP_IDS, seed=abs(hash(name)) % 9973),
        problem=problem(turns),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    vocab = greedy_tokenizer().num_ids
    return [make_model_folder(root / str(seed), seed=seed, vocab=vocab) for seed in range(2)]


async def lead(folders, folder, *, policy, trajectories, turns, length=400, publishes=False, make=Chatter):
    log = folder / "engine.log"
    engine = LocalEngine(folders[0], max_batch=64, max_len=512, kv_capacity=64 * 512)
    await engine.start()
    weights, segments = Folders(folders), folder / "segments"
    host = make_host(make, folder / "environments", max_turns=100)
    environments = HereEnvironments(host, holds_at=5 if publishes else None)
    label = f"replica-0-1-{next(LABELS)}"
    replica = Replica(
        0,
        engine=LoggedEngine(engine, log),
        weights=weights,
        store=SegmentStore(segments, label, PayloadReader(segments)),
        clock=SystemClock(),
        on_new_weights=policy,
        batch=trajectories,
        max_batch=64,
        partial_interval_s=0.05,
        environments=environments,
    )
    replica._streams.save_partials = replica._streams.report_all
    story = Story(replica, segments, log, weights, environments)
    task = asyncio.create_task(replica.run())
    try:
        names = [f"g{number}.0" for number in range(trajectories)]
        await story.lead(names, turns=turns, length=length, publishes=publishes)
    finally:
        task.cancel()
        await asyncio.wait([task])
        await engine.close()
    return story


@pytest.fixture(scope="module")
def story(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return asyncio.run(lead(folders, folder, policy=OnNewWeights.DRAIN, trajectories=TRAJECTORIES, turns=TURNS))


def assert_trained_as_sampled(story):
    sampled, tokenizer = story.sampled(), greedy_tokenizer()
    again = 0
    for trajectory in story.trajectories():
        ids, logprobs = sampled[trajectory.id]
        mask = trajectory.loss_mask
        assert trajectory.response_ids[mask].tolist() == ids, (
            "trained ids are those that were sampled, all of them"
        )
        assert trajectory.logprobs[mask].tolist() == pytest.approx(logprobs, abs=0)
        assert trajectory.num_trained == len(ids)
        text = tokenizer.decode(trajectory.response_ids, special=True)
        again += tokenizer.encode(text).tolist() != trajectory.response_ids.tolist()
    assert again > 0.9 * len(story.told), "the tokenizer is nasty: a second encoding would differ"


def test_trained_ids_are_those_that_the_engine_sampled_over_thousands_of_turns(story):
    assert sum(num_turns(told.spans) for told in story.told.values()) >= TURNS * TRAJECTORIES * 0.99
    assert_trained_as_sampled(story)


def test_no_token_of_an_environment_has_a_weight_in_a_microbatch(story):
    trajectories = story.trajectories()[:200]
    packed = pack_step(
        trajectories, max_tokens=2048, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.01
    )
    weighted = [batch.labels[np.flatnonzero(batch.loss_weights)] for batch in packed.microbatches(0)]
    sampled = story.sampled()
    wanted = sorted(id for one in trajectories for id in sampled[one.id][0])
    assert sorted(np.concatenate(weighted).tolist()) == wanted


def test_the_learner_gives_each_trained_token_the_log_probability_that_the_engine_had(story, folders):
    learner = make_learner(folders[0])
    packed = pack_step(
        story.trajectories()[:200],
        max_tokens=2048,
        ranks=1,
        aggregation=Aggregation.TOKEN_MEAN,
        attention_share=0.01,
    )
    for batch in packed.microbatches(0):
        logprobs, _ = policy_logprobs(learner.model, batch)
        rows = np.flatnonzero(batch.loss_weights)
        assert np.abs(logprobs.detach().numpy()[rows] - batch.behaviour_logprobs[rows]).max() <= 1e-4


def test_the_packed_loss_of_turns_is_that_of_the_trajectories_one_by_one(story, folders):
    items = story.trajectories()[:24]
    packed = pack_step(items, max_tokens=1024, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.01)
    alone = Packed([[[item] for item in items]], packed.weights).microbatches(0)
    one = make_learner(folders[0]).step(packed.microbatches(0))
    other = make_learner(folders[0]).step(alone)
    assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-7)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


@pytest.fixture(scope="module")
def tree(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    return asyncio.run(
        lead(folders, folder, policy=OnNewWeights.DRAIN, trajectories=100, turns=TURNS, make=Wanderer)
    )


def test_a_tree_of_sequences_trains_each_sampled_token_once_in_the_context_that_it_was_sampled_in(tree, folders):
    trajectories, sampled = tree.trajectories(), tree.sampled()
    packed = pack_step(
        trajectories, max_tokens=4096, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.01
    )
    model, weighted, num_sequences = make_learner(folders[0]).model, [], 0
    for batch in packed.microbatches(0):
        rows = np.flatnonzero(batch.loss_weights)
        logprobs, _ = policy_logprobs(model, batch)
        assert np.abs(logprobs.detach().numpy()[rows] - batch.behaviour_logprobs[rows]).max() <= 1e-4
        weighted.append(batch.labels[rows])
        num_sequences += len(batch.lengths)
    assert sorted(np.concatenate(weighted).tolist()) == sorted(id for ids, _ in sampled.values() for id in ids)
    assert num_sequences > 3 * len(trajectories), "most trajectories have several"
    assert sum(map(is_tree, (one.spans for one in trajectories))) > 90


def test_the_packed_loss_of_trees_is_that_of_the_trajectories_one_by_one(tree, folders):
    items = tree.trajectories()[:24]
    packed = pack_step(items, max_tokens=1024, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.01)
    alone = Packed([[[item] for item in items]], packed.weights).microbatches(0)
    one, other = make_learner(folders[0]).step(packed.microbatches(0)), make_learner(folders[0]).step(alone)
    assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-7)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


async def test_trees_under_changing_weights_are_trained_as_sampled(folders, tmp_path):
    story = await lead(
        folders,
        tmp_path,
        policy=OnNewWeights.RESUME,
        trajectories=100,
        turns=8,
        publishes=True,
        make=Wanderer,
    )
    assert_trained_as_sampled(story)
    assert {span.version for told in story.told.values() for span in told.spans} == {None, 0, 1}


async def test_turns_under_changing_weights_are_trained_as_sampled_with_the_version_of_each(folders, tmp_path):
    story = await lead(folders, tmp_path, policy=OnNewWeights.RESUME, trajectories=150, turns=8, publishes=True)
    assert_trained_as_sampled(story)
    versions = {span.version for told in story.told.values() for span in told.spans}
    assert versions == {None, 0, 1}


async def test_the_cap_on_tokens_counts_those_of_the_environment(folders, tmp_path):
    story = await lead(folders, tmp_path, policy=OnNewWeights.DRAIN, trajectories=20, turns=99, length=40)
    for trajectory in story.trajectories():
        assert trajectory.finish_reason is FinishReason.LENGTH
        assert len(trajectory.response_ids) == 40
