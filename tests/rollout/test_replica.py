"""A replica with the real embedded engine: when it takes new weights, and that no token is lost or doubled."""

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from itertools import count

import msgspec
import numpy as np
import pytest

from laminar_py.config.rollout import OnNewWeights
from laminar_py.engines.local.engine import LocalEngine
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import SegmentWriter, tokens_ref
from laminar_py.records.engine import EngineLostError, PauseMode, SamplingParams
from laminar_py.records.host import SystemClock
from laminar_py.records.pieces import Piece
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, InterruptReason, Kind
from laminar_py.rollout.replica import Replica
from laminar_py.rollout.running import RunningTrajectory
from laminar_py.rollout.storing import SegmentStore
from tests.events import make_assignment
from tests.learner.builders import make_model_folder
from tests.rollout.folders import Folders

PATIENCE_S = 60.0
STARTS = count()


class Story:
    """What a replica reported, put together per trajectory; its tokens are in segments in `folder`."""

    def __init__(self, replica, folder, label):
        self.replica = replica
        self.folder, self.label = folder, label
        self.task = asyncio.create_task(replica.run())
        self.ids = defaultdict(list)
        self.tokens = defaultdict(tuple)  # where they lie
        self.missing = {}
        self.spans = defaultdict(list)
        self.ended = {}
        self.loads, self.lost = [], []
        self.broken = defaultdict(list)
        self.refused = {}
        self.checksums = {}
        self.admissible = self.generated = 0

    async def take(self):
        report = await self.replica.next_report(0.2)
        for item in report.progress:
            assert item.start == len(self.ids[item.trajectory_id]), "every token once, in order"
            if item.tokens is not None:
                self.tokens[item.trajectory_id] += (item.tokens,)
                self.ids[item.trajectory_id] += self.ids_of(item.tokens)
            self.spans[item.trajectory_id] += item.spans
            if item.broken is not None:
                self.broken[item.broken].append(item.trajectory_id)
            if item.lost:
                self.missing[item.trajectory_id] = item.detail
            if item.failure is DropReason.REFUSED:
                self.refused[item.trajectory_id] = item.detail
            if item.finish_reason is not None:
                self.ended[item.trajectory_id] = item
        self.loads += [load.version for load in report.loads]
        self.lost += report.lost
        self.checksums |= {load.version: load.checksum for load in report.loads}
        self.admissible = report.admissible
        self.generated += report.generated
        return report

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self):
                await self.take()

    def ids_of(self, tokens):
        piece = PayloadReader(self.folder).load([tokens.at]).piece(tokens.at)
        return np.frombuffer(piece.ids, np.int32).tolist()

    def begun(self, name, ids):
        """Where a response lies that another replica began with these ids."""
        piece = Piece(
            trajectory_id=name,
            epoch=1,
            start=0,
            spans=(Span(0, 0, len(ids)),),
            ids=np.array(ids, np.int32).tobytes(),
            logprobs=np.zeros(len(ids), np.float32).tobytes(),
        )
        self.ids[name] = list(ids)
        return (tokens_ref(piece, SegmentWriter(self.folder, "replica-9").write(piece)),)

    def versions(self, name):
        return {span.version for span in self.spans[name]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [make_model_folder(root / str(seed), seed=seed) for seed in range(2)]


class Read:
    """An engine that tells of no stream, so that each of them is read."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        if name == "follow":
            raise AttributeError(name)
        return getattr(self._engine, name)


@asynccontextmanager
async def serving(
    folders,
    *,
    policy=OnNewWeights.DRAIN,
    batch=4,
    max_len=4096,
    is_read=False,
    reports_partials=True,
    drafts=False,
    **options,
):
    """A replica that reports partial responses in place of writing them to its journal."""
    engine = LocalEngine(folders[0], max_batch=8, max_len=max_len, kv_capacity=8 * max_len, drafts=drafts)
    await engine.start()
    weights = Folders(folders)
    segments, label = folders[0].parent / "segments", f"replica-0-1-{next(STARTS)}"
    options = {"partial_interval_s": 0.05, **options}
    replica = Replica(
        0,
        engine=Read(engine) if is_read else engine,
        weights=weights,
        store=SegmentStore(segments, label, PayloadReader(segments)),
        clock=SystemClock(),
        on_new_weights=policy,
        batch=batch,
        max_batch=8,
        **options,
    )
    if reports_partials:
        replica._streams.save_partials = replica._streams.report_all
    story = Story(replica, segments, label)
    try:
        yield story, weights
    finally:
        story.task.cancel()
        await asyncio.wait([story.task])
        await engine.close()


def assignment(name, *, length=30, version=None, tokens=(), kind=Kind.TRAIN, temperature=1.0):
    prompt = np.array([3, 4, 5], np.int32)
    sampling = SamplingParams(max_new_tokens=length, temperature=temperature, seed=abs(hash(name)) % 1000)
    return make_assignment(
        name, group_id=name, kind=kind, prompt_ids=prompt, tokens=tuple(tokens), sampling=sampling, version=version
    )


async def test_drain_admits_a_batch_under_a_version_and_then_takes_the_newest(folders):
    async with serving(folders, batch=2) as (story, weights):
        await story.until(lambda s: s.admissible == 2)
        story.replica.start_assignments([assignment("a", length=2000), assignment("b")])
        await story.until(lambda s: "b" in s.ended)
        await weights.publish(1)
        await story.take()
        assert story.admissible == 0, "the batch is admitted, so nothing more under version 0"
        assert story.loads == [0], "it waits for the one that runs"
        await story.until(lambda s: s.loads == [0, 1] and s.admissible == 2)
        assert story.versions("a") == {0}


async def test_resume_loads_at_once_and_continues_under_the_new_version(folders):
    async with serving(folders, policy=OnNewWeights.RESUME) as (story, weights):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=1500)])
        await story.until(lambda s: len(s.ids["a"]) > 0)
        await weights.publish(1)
        await story.until(lambda s: "a" in s.ended)
        assert story.broken == {InterruptReason.NEW_WEIGHTS: ["a"]}
        assert story.versions("a") == {0, 1}
        assert len(story.ids["a"]) == 1500


@pytest.mark.parametrize("policy", [OnNewWeights.RETRACT, OnNewWeights.IN_PLACE])
async def test_weights_that_come_under_a_running_trajectory_do_not_interrupt_it(folders, policy):
    async with serving(folders, policy=policy) as (story, weights):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=1500)])
        await story.until(lambda s: len(s.ids["a"]) > 0)
        await weights.publish(1)
        await story.until(lambda s: "a" in s.ended)
        assert not story.broken
        assert story.versions("a") == {0, 1}
        on_old_cache = {span.kv_version for span in story.spans["a"] if span.version == 1}
        assert on_old_cache == ({0} if policy is OnNewWeights.IN_PLACE else {None})


async def test_the_first_load_and_one_in_n_versions_are_verified_whichever_it_skips(folders):
    async with serving(folders, verify_every=2) as (story, weights):
        for version in (1, 2, 3, 6, 7, 8):
            known = len(story.checksums)
            await story.until(lambda s, known=known: len(s.checksums) > known)
            await weights.publish(version)
        await story.until(lambda s: s.loads == [0, 1, 2, 3, 6, 7, 8])
        verified = {version: checksum for version, checksum in story.checksums.items() if checksum}
        assert list(verified) == [0, 2, 6, 8]
        assert len(set(verified.values())) == 1, "the even versions have equal weights"


@pytest.mark.parametrize("is_read", [True, False])  # or its engine tells of streams
async def test_a_lost_engine_reports_what_it_gave_and_then_raises(folders, is_read):
    async with serving(folders, is_read=is_read) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=4000), assignment("b", length=4000)])
        await story.until(lambda s: len(s.ids["a"]) > 0)
        lose(story.replica._engine)
        story.replica.start_assignments([assignment("c", length=4000)])
        with pytest.raises(EngineLostError):
            await story.until(lambda s: False)
        assert story.broken == {InterruptReason.ENGINE_LOST: ["c"]}
        assert min(len(story.ids[name]) for name in ("a", "b", "c")) > 0
        assert story.admissible == 0


@pytest.mark.parametrize("method", ["abort", "give_up", "stop", "survey", "collect", "cut_overdue", "load"])
async def test_whichever_call_finds_the_engine_lost_one_last_report_has_what_it_gave(folders, method):
    async with serving(folders, policy=OnNewWeights.IN_PLACE, max_seconds=3600) as (story, weights):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=4000)])
        await story.until(lambda s: len(s.ids["a"]) > 0)
        for call in ("abort", "pause", "load_weights", "checksum"):
            setattr(story.replica._engine, call, gone)
        story.replica._engine.status = lost
        given = story.replica._streams.running["a"].length
        match method:
            case "abort" | "give_up":
                await getattr(story.replica, method)(["a"])
            case "stop":
                await story.replica.stop(evaluations=True)
            case "survey":
                await story.replica.survey()
            case "cut_overdue":
                story.replica._max_seconds = 0.0
            case "load":
                await weights.publish(1)
        with pytest.raises(EngineLostError):
            await story.until(lambda s: False)
        assert len(story.ids["a"]) >= given


@pytest.mark.parametrize("is_read", [True, False])  # or its engine tells of streams
async def test_a_mistake_of_our_own_in_an_engine_ends_the_replica_and_is_no_refusal(folders, is_read):
    async with serving(folders, is_read=is_read) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        setattr(story.replica._engine, "generate" if is_read else "follow", mistaken)
        story.replica.start_assignments([assignment("a")])
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(story.task, PATIENCE_S)
        assert raised.group_contains(TypeError)
        assert not story.refused


@pytest.mark.parametrize("is_read", [True, False])  # or its engine tells of streams
async def test_a_mistake_with_what_an_engine_gave_ends_the_replica(folders, monkeypatch, is_read):
    async with serving(folders, is_read=is_read) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        monkeypatch.setattr(RunningTrajectory, "append_delta", mistaken)
        story.replica.start_assignments([assignment("a"), assignment("b")])
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(story.task, PATIENCE_S)
        assert raised.group_contains(TypeError)
        assert not any(running.is_open for running in story.replica._streams.running.values())


@pytest.mark.parametrize("is_read", [True, False])  # or its engine tells of streams
async def test_what_the_engine_refuses_is_reported_with_its_words_and_costs_nobody_else(folders, is_read):
    async with serving(folders, max_len=64, is_read=is_read) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        begun = story.begun("long", range(2, 66))
        story.replica.start_assignments([assignment("long", tokens=begun), assignment("a")])
        await story.until(lambda s: "a" in s.ended and s.refused)
        assert "rollout.max_len=64" in story.refused["long"]
        assert "long" not in story.ended


def lost():
    raise EngineLostError("gone")


async def gone(*_):
    lost()


def mistaken(*_):
    raise TypeError("a mistake of our own")


def lose(engine):
    """Have an engine lost after the first delta of its next stream."""
    generate, follow = engine.generate, getattr(engine, "follow", None)

    async def generate_a_little(request):
        async for delta in generate(request):
            yield delta
            raise EngineLostError("gone")

    def follow_a_little(request, hear):
        heard = count()

        def hear_a_little(delta):
            if not next(heard):
                hear(delta)
                hear(EngineLostError("gone"))

        follow(request, hear_a_little)

    if follow is None:
        engine.generate = generate_a_little
    else:
        engine.follow = follow_a_little


async def test_a_pinned_trajectory_makes_an_idle_replica_load_its_version(folders):
    async with serving(folders) as (story, weights):
        await story.until(lambda s: s.loads == [0])
        story.replica.start_assignments([assignment("mine", version=4, tokens=story.begun("mine", (7, 8, 9)))])
        await story.until(lambda s: "mine" in s.ended)
        assert story.versions("mine") == {4}
        await weights.publish(5)
        await story.until(lambda s: s.loads == [0, 4, 5] and s.admissible == 4)


async def test_an_engine_never_goes_back_to_an_older_version(folders):
    async with serving(folders) as (story, weights):
        await weights.publish(5)
        await story.until(lambda s: s.loads and s.loads[-1] == 5)
        story.replica.start_assignments([assignment("old", version=4)])
        await story.until(lambda s: "old" in s.ended)
        assert story.ended["old"].finish_reason is FinishReason.ABORT, "handed back, not lost"
        assert (story.lost, story.loads[-1]) == ([], 5)


async def test_a_pinned_trajectory_whose_version_is_gone_is_reported_lost(folders):
    async with serving(folders) as (story, weights):
        await story.until(lambda s: s.loads == [0])
        weights.lost.add(9)
        story.replica.start_assignments([assignment("gone", version=9)])
        await story.until(lambda s: s.lost == ["gone"])
        await story.until(lambda s: s.admissible == 4)


async def test_a_revived_replica_takes_up_what_it_was_started_for_first(folders):
    initial = [assignment("newer", version=5), assignment("older", version=3)]
    async with serving(folders, initial=initial) as (story, weights):
        await weights.publish(8)
        await story.until(lambda s: len(s.ended) == 2)
        assert (story.versions("older"), story.versions("newer")) == ({3}, {5})
        await story.until(lambda s: s.loads == [3, 5, 8])


async def test_one_that_has_lost_what_it_was_started_for_admits_nothing_before_the_first_weights(folders):
    async with serving(folders, initial=[assignment("gone", version=3)]) as (story, weights):
        weights.newest = -1  # as where a host was started again, and the learner is not up yet
        weights.lost.add(3)
        await story.until(lambda s: s.lost == ["gone"])
        for _ in range(3):
            report = await story.take()
            assert report.admissible == 0, "what came now would keep it from loading any"
        await weights.publish(4)
        await story.until(lambda s: s.admissible == 4)
        assert story.loads == [4]


async def test_no_more_is_expected_of_a_pass_whose_version_is_lost(folders):
    part = msgspec.structs.replace(assignment("e", version=3, kind=Kind.EVAL), more_to_come=True)
    async with serving(folders, initial=[part]) as (story, weights):
        weights.lost |= {3, 5}
        await story.until(lambda s: s.lost == ["e"] and s.loads == [0] and s.admissible == 4)
        story.replica.start_assignments([msgspec.structs.replace(part, trajectory_id="e2", version=5)])
        await story.until(lambda s: s.lost == ["e", "e2"])
        await weights.publish(6)
        await story.until(lambda s: s.loads == [0, 6] and s.admissible == 4)


async def test_a_call_off_before_the_first_weights_admits_nothing(folders):
    async with serving(folders) as (story, weights):
        weights.newest = -1
        story.replica.call_off(["g0.0"])
        for _ in range(3):
            report = await story.take()
            assert report.admissible == 0
        await weights.publish(0)
        await story.until(lambda s: s.admissible == 4)


async def test_a_speed_is_not_measured_before_the_first_weights(folders):
    sampling = SamplingParams(max_new_tokens=64)
    async with serving(folders, initial=[assignment("gone", version=3)]) as (story, weights):
        weights.newest = -1
        weights.lost.add(3)
        speed = asyncio.create_task(story.replica.measure_speed(vocab=64, max_len=64, sampling=sampling))
        await story.until(lambda s: s.lost == ["gone"])
        await story.take()
        assert not speed.done()
        await weights.publish(4)
        await story.until(lambda s: speed.done())
        assert story.loads == [4]


async def test_stop_returns_everything_with_its_partial_and_admits_nothing(folders):
    async with serving(folders) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=4000), assignment("b", length=4000, version=7)])
        await story.until(lambda s: len(s.ids["a"]) > 0)
        await story.replica.stop(evaluations=False)
        await story.until(lambda s: {"a", "b"} <= set(s.ended))
        assert {item.finish_reason for item in story.ended.values()} == {FinishReason.ABORT}
        assert story.admissible == 0


async def test_stop_returns_an_evaluation_too_where_the_run_ends(folders):
    async with serving(folders) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("e", length=4000, version=0, kind=Kind.EVAL)])
        await story.until(lambda s: len(s.ids["e"]) > 0)
        await story.replica.stop(evaluations=True)
        await story.until(lambda s: "e" in s.ended)
        assert story.ended["e"].finish_reason is FinishReason.ABORT
        assert 0 < len(story.ids["e"]) < 4000


async def test_the_cap_on_wall_time_cuts_a_trajectory_and_keeps_what_it_has(folders):
    async with serving(folders, max_seconds=0.05) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("slow", length=4000)])
        await story.until(lambda s: "slow" in s.ended)
        assert story.ended["slow"].cut is Cap.SECONDS
        assert story.ended["slow"].finish_reason is FinishReason.LENGTH
        assert 0 < len(story.ids["slow"]) < 4000


async def test_running_trajectories_report_what_they_have_at_intervals_where_somebody_looks_ahead(folders):
    async with serving(folders) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=3000)])
        await story.until(lambda s: len(s.ids["a"]) > 0)
        assert "a" not in story.ended


async def test_an_evaluation_does_not_count_towards_the_batch_and_is_not_interrupted(folders):
    async with serving(folders, policy=OnNewWeights.RESUME) as (story, weights):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("e", length=1500, version=0, kind=Kind.EVAL)])
        await story.until(lambda s: len(s.ids["e"]) > 0)
        await weights.publish(1)
        await story.until(lambda s: "e" in s.ended)
        assert story.versions("e") == {0}
        await story.until(lambda s: s.loads == [0, 1])


@pytest.mark.parametrize("policy", [OnNewWeights.RESUME, OnNewWeights.IN_PLACE])
async def test_weights_that_waited_for_an_evaluation_are_taken_while_training_goes_on(folders, policy):
    async with serving(folders, policy=policy) as (story, weights):
        await story.until(lambda s: s.admissible > 0)
        evaluation = assignment("e", length=300, version=0, kind=Kind.EVAL)
        story.replica.start_assignments([assignment("a", length=3000), evaluation])
        await story.until(lambda s: len(s.ids["e"]) > 0)
        await weights.publish(1)
        await story.until(lambda s: s.loads == [0, 1])
        assert "e" in story.ended
        assert "a" not in story.ended


async def test_an_empty_replica_begins_a_new_batch_though_the_last_was_not_full(folders):
    async with serving(folders, batch=4) as (story, _):
        await story.until(lambda s: s.admissible == 4)
        story.replica.start_assignments([assignment("a"), assignment("b"), assignment("c")])
        await story.until(lambda s: len(s.ended) == 3 and s.admissible == 4)


async def test_what_arrives_while_weights_load_counts_towards_their_batch(folders):
    async with serving(folders, batch=4) as (story, weights):
        await story.until(lambda s: s.admissible == 4)
        await weights.publish(1)
        story.replica.start_assignments([assignment("a", length=3000)])
        await story.until(lambda s: len(s.ids["a"]) > 0)
        await story.take()
        assert story.admissible == 3


async def test_after_stop_training_work_is_handed_back_and_an_evaluation_still_runs(folders):
    async with serving(folders) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        await story.replica.stop(evaluations=False)
        story.replica.start_assignments([assignment("late"), assignment("e", version=0, kind=Kind.EVAL)])
        await story.until(lambda s: {"late", "e"} <= set(s.ended))
        assert story.ended["late"].finish_reason is FinishReason.ABORT
        assert story.ended["e"].finish_reason is FinishReason.LENGTH


async def test_stop_hands_back_what_waits_for_weights(folders):
    async with serving(folders) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        story.replica._streams.serving.clear()  # as while weights are loaded
        story.replica.start_assignments([assignment("a")])
        await story.replica.stop(evaluations=False)
        await story.until(lambda s: "a" in s.ended)
        assert story.ended["a"].finish_reason is FinishReason.ABORT


async def test_new_weights_may_come_before_anything_has_entered_the_engine(folders):
    async with serving(folders, policy=OnNewWeights.RESUME) as (story, weights):
        await story.until(lambda s: s.admissible > 0)
        weights.newest = story.replica._newest = 1  # as if announced in the same turn of the loop
        story.replica.start_assignments([assignment("a")])
        story.replica._weights_wanted.set()
        await story.until(lambda s: "a" in s.ended)
        assert max(story.versions("a")) == 1, "its first tokens may be older: the pull runs while it generates"


async def test_what_is_given_up_is_reported_at_once_and_goes_on_elsewhere_with_the_same_tokens(folders):
    greedy = {"length": 900, "temperature": 0.0}
    async with serving(folders) as (source, _), serving(folders) as (other, _):
        await source.until(lambda s: s.admissible > 0)
        await other.until(lambda s: s.admissible > 0)
        other.replica.start_assignments([assignment("b", length=2000), assignment("whole", **greedy)])
        source.replica.start_assignments([assignment("a", **greedy)])
        await source.until(lambda s: len(s.ids["a"]) > 0)
        assert other.replica.expect(0, ["a"])
        await source.replica.give_up(["a"])
        await source.take()
        assert source.ended["a"].finish_reason is FinishReason.ABORT
        prefix = source.ids["a"]
        other.ids["a"] = list(prefix)
        other.replica.start_assignments([assignment("a", tokens=source.tokens["a"], version=0, **greedy)])
        await other.until(lambda s: {"a", "whole"} <= s.ended.keys())
        assert len(prefix) < 900
        assert other.ids["a"] == other.ids["whole"]


async def test_a_survey_says_what_runs_and_what_has_not_begun(folders):
    async with serving(folders, batch=12) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        assert not (await story.replica.survey()).can_move, (
            "it has nothing to do and may leave its version at any time"
        )
        story.replica.start_assignments([assignment(f"a{i}", length=3000) for i in range(10)])
        await story.until(lambda s: sum(map(bool, s.ids.values())) == 8)
        survey = await story.replica.survey()
        assert (survey.can_move, survey.version, survey.slots) == (True, 0, 8)
        assert {held.trajectory_id for held in survey.waiting} == {"a8", "a9"}
        assert all(held.context == held.length + 3 > 3 for held in survey.running)
        assert 0 < survey.kv_used <= survey.kv_capacity


async def test_a_promise_keeps_the_version_until_all_have_come_or_are_called_off(folders):
    async with serving(folders) as (story, weights):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("a")])
        assert story.replica.expect(0, ["b", "c"])
        assert not story.replica.expect(1, ["d"]), "it does not serve that version"
        await weights.publish(1)
        await story.until(lambda s: "a" in s.ended)
        story.replica.start_assignments([assignment("b", version=0)])
        await story.until(lambda s: "b" in s.ended)
        assert story.loads == [0]
        assert story.versions("b") == {0}
        story.replica.start_assignments([assignment("e", version=1)])
        assert story.replica._expected == {"c"}, "others that come are not those"
        story.replica.call_off(["c"])
        await story.until(lambda s: s.loads == [0, 1])


@pytest.mark.parametrize("policy", [OnNewWeights.DRAIN, OnNewWeights.RESUME])
async def test_a_version_is_kept_between_two_parts_of_a_pass(folders, policy):
    async with serving(folders, policy=policy) as (story, weights):
        await story.until(lambda s: s.admissible > 0)
        first = assignment("first", kind=Kind.EVAL)
        story.replica.start_assignments([msgspec.structs.replace(first, more_to_come=True)])
        await story.until(lambda s: "first" in s.ended)
        story.replica.start_assignments([assignment("beside")])
        await weights.publish(1)
        await story.until(lambda s: "beside" in s.ended)
        story.replica.start_assignments([assignment("second", version=0, kind=Kind.EVAL)])
        await story.until(lambda s: "second" in s.ended)
        assert story.loads == [0]
        assert story.versions("second") == {0}
        story.replica.call_off([first.group_id])
        await story.until(lambda s: s.loads == [0, 1])


@pytest.mark.parametrize("policy", [OnNewWeights.DRAIN, OnNewWeights.RESUME])
async def test_a_part_of_a_pass_makes_an_idle_replica_load_its_version_though_more_is_to_come(folders, policy):
    async with serving(folders, policy=policy) as (story, weights):
        await story.until(lambda s: s.loads == [0])
        part = assignment("part", version=4, kind=Kind.EVAL)
        story.replica.start_assignments([msgspec.structs.replace(part, more_to_come=True)])
        await story.until(lambda s: "part" in s.ended)
        await weights.publish(5)
        story.replica.start_assignments([assignment("rest", version=4, kind=Kind.EVAL)])
        await story.until(lambda s: "rest" in s.ended)
        assert story.versions("part") == story.versions("rest") == {4}
        story.replica.call_off([part.group_id])
        await story.until(lambda s: s.loads == [0, 4, 5])


async def test_no_more_is_expected_of_a_pass_whose_version_an_engine_has_left(folders):
    async with serving(folders) as (story, weights):
        await weights.publish(5)
        await story.until(lambda s: s.loads and s.loads[-1] == 5)
        story.replica.start_assignments([msgspec.structs.replace(assignment("e", version=4), more_to_come=True)])
        await story.until(lambda s: "e" in s.ended)
        await weights.publish(6)
        await story.until(lambda s: s.loads[-1] == 6)


async def test_one_that_stops_keeps_no_promise(folders):
    async with serving(folders) as (story, weights):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=3000)])
        assert story.replica.expect(0, ["b"])
        await story.replica.stop(evaluations=False)
        await weights.publish(1)
        story.replica.start_assignments([assignment("eval", version=1, kind=Kind.EVAL)])
        await story.until(lambda s: "eval" in s.ended)
        assert story.versions("eval") == {1}


async def test_what_comes_from_elsewhere_takes_nothing_from_the_batch_of_a_version(folders):
    async with serving(folders, batch=4) as (story, _):
        await story.until(lambda s: s.admissible == 4)
        story.replica.start_assignments(
            [assignment("a", length=2000), assignment("moved", length=2000, version=0)]
        )
        report = await story.take()
        assert (report.admissible, report.received) == (3, 1)


async def test_the_speed_of_an_engine_is_measured_while_new_weights_wait(folders):
    async with serving(folders) as (story, weights):
        settings = {"vocab": 61, "max_len": 128, "sampling": SamplingParams(max_new_tokens=1)}
        measuring = asyncio.create_task(story.replica.measure_speed(**settings))
        await story.until(lambda s: s.loads == [0])
        await weights.publish(1)
        async with asyncio.timeout(PATIENCE_S):
            speed, alone = await measuring
        assert alone
        assert speed.step_s > 0
        assert speed.prefill_tokens_per_s > 0
        await story.until(lambda s: s.loads == [0, 1])


async def test_a_trajectory_that_is_ended_twice_at_a_time_is_reported_once(folders):
    async with serving(folders) as (story, _):
        await story.until(lambda story: story.loads)
        story.replica.start_assignments([assignment("inside", length=2000), assignment("other", length=2000)])
        await story.until(lambda story: story.ids["inside"])
        story.replica.start_assignments([assignment("outside", length=2000, version=9)])
        names = ["inside", "outside"]
        await asyncio.gather(story.replica.abort(names), story.replica.give_up(names), story.replica.abort(names))
        await story.until(lambda story: {"inside", "outside"} <= set(story.ended))
        assert not story.task.done()


async def test_what_ends_by_itself_while_it_is_aborted_is_reported_once(folders):
    async with serving(folders) as (story, _):
        await story.until(lambda story: story.loads)
        story.replica.start_assignments([assignment("a", length=2000)])
        await story.until(lambda story: story.ids["a"])
        streams = story.replica._streams
        aborting = asyncio.create_task(streams.abort(["a"]))
        await asyncio.sleep(0)  # it has chosen whom to end
        streams._end(streams.running["a"], FinishReason.STOP)
        await aborting
        await story.until(lambda story: "a" in story.ended)
        assert story.ended["a"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RELEASE])
@pytest.mark.parametrize("policy", OnNewWeights)
async def test_a_held_replica_computes_nothing_and_then_goes_on_as_if_nothing_had_been(folders, policy, mode):
    async with serving(folders, policy=policy) as (story, weights):
        await story.until(lambda s: s.admissible > 0)
        work = [assignment(name, length=1200, temperature=0.0) for name in ("a", "gone")]
        story.replica.start_assignments(work)
        await story.until(lambda s: len(s.ids["a"]) > 0 and len(s.ids["gone"]) > 0)
        await story.replica.hold(mode)
        story.replica.start_assignments([assignment("late")])
        await weights.publish(1)
        await story.replica.abort(["gone"])
        await story.until(lambda s: "gone" in s.ended)
        await story.take()
        before = dict(story.ids)
        for _ in range(3):
            await story.take()
        assert story.ids == before, "nothing was generated"
        assert story.loads == [0], "no weights were loaded"
        assert not story.replica.expect(0, ["moved"]), "it promises nothing"
        await story.replica.unhold()
        await story.until(lambda s: {"a", "late"} <= s.ended.keys() and 1 in s.loads)
        assert story.ended["gone"].finish_reason is FinishReason.ABORT
        assert len(story.ids["a"]) == 1200
        assert story.versions("a") == ({0} if policy is OnNewWeights.DRAIN else {0, 1})
        if policy is OnNewWeights.DRAIN:
            assert story.versions("late") == {0}, "it was admitted under this version"


async def test_tokens_of_a_trajectory_that_was_held_are_those_of_one_that_was_not(folders):
    async with serving(folders) as (story, _):
        await story.until(lambda s: s.admissible > 1)
        story.replica.start_assignments([assignment("a", length=600, temperature=0.0)])
        for mode in (PauseMode.IN_PLACE, PauseMode.RELEASE, PauseMode.RELEASE):
            await story.take()
            await story.replica.hold(mode)
            await story.replica.unhold()
        story.replica.start_assignments([assignment("b", length=600, temperature=0.0)])
        await story.until(lambda s: {"a", "b"} <= s.ended.keys())
        assert story.ids["a"] == story.ids["b"]


async def test_a_hold_that_is_called_off_while_it_waits_holds_nothing(folders):
    async with serving(folders) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        async with story.replica._weights_lock:  # as while weights are loaded
            hold = asyncio.create_task(story.replica.hold(PauseMode.IN_PLACE))
            await asyncio.sleep(0)
            await story.replica.unhold()
        await hold
        story.replica.start_assignments([assignment("a")])
        await story.until(lambda s: "a" in s.ended)


async def test_a_hold_after_one_that_was_called_off_is_the_only_one(folders):
    """A learner that dies as it asks for the devices is followed by one that asks again."""
    async with serving(folders) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        async with story.replica._weights_lock:  # as while weights are loaded
            first = asyncio.create_task(story.replica.hold(PauseMode.IN_PLACE))
            await asyncio.sleep(0)
            await story.replica.unhold()
            second = asyncio.create_task(story.replica.hold(PauseMode.IN_PLACE))
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(first, second), PATIENCE_S)
        assert story.replica._holding.is_held
        await story.replica.unhold()
        story.replica.start_assignments([assignment("a")])
        await story.until(lambda s: "a" in s.ended)


async def test_time_in_which_a_replica_is_held_does_not_count_against_its_trajectories(folders):
    async with serving(folders, max_seconds=3600.0) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=4000)])
        await story.until(lambda s: len(s.ids["a"]) > 0)
        await story.replica.hold(PauseMode.IN_PLACE)
        story.replica._max_seconds = 0.0  # far too few
        await asyncio.sleep(0.5)
        running, clock = story.replica._running["a"], story.replica._out.clock
        used_s, story.replica._max_seconds = running.used_s(clock.now()), 3600.0
        await story.replica.unhold()
        assert used_s > 0.5
        assert running.used_s(clock.now()) < used_s


async def test_an_engine_that_is_lost_while_it_is_held_is_told_as_any_other(folders):
    async with serving(folders) as (story, _):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments([assignment("a", length=4000)])
        await story.until(lambda s: len(s.ids["a"]) > 0)
        story.replica._engine.pause = gone
        await story.replica.hold(PauseMode.IN_PLACE)
        await story.replica.unhold()
        with pytest.raises(EngineLostError):
            await story.until(lambda s: False)
