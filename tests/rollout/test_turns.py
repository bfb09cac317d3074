"""A replica whose trajectories an environment answers: who has the next word, and what becomes of who waits."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from laminar_py.config.rollout import OnNewWeights
from laminar_py.ledger.segments.frames import whole_frames
from laminar_py.records.engine import Delta, SamplingParams
from laminar_py.records.environment import EnvironmentTurn, Problem
from laminar_py.records.host import SystemClock
from laminar_py.records.pieces import TokensRef
from laminar_py.records.spans import NEW_CONVERSATION, merge_spans, num_turns, sequences_of
from laminar_py.records.trajectory import Cap, DropReason, FinishReason
from laminar_py.rollout.outbox import Outbox
from laminar_py.rollout.running import StreamState
from laminar_py.rollout.streams import Streams
from tests.builders import make_ref
from tests.learner.builders import VOCAB, make_model_folder
from tests.rollout.test_replica import assignment, serving

STOP_IDS = tuple(range(VOCAB // 2))  # so that a turn of a model of random weights has a few tokens
SAYS = np.array([5, 6, 7], np.int32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [make_model_folder(root / str(seed), seed=seed) for seed in range(2)]


class Scripted:
    """Environments that answer by `script(turns)`, from the turn `holds_at` on once `go` is set."""

    def __init__(self, script, *, holds_at=None):
        self.script, self.holds_at = script, holds_at
        self.asked, self.forgotten = [], []
        self.go, self.held = asyncio.Event(), asyncio.Event()
        self.heard, self.turns = {}, []

    def taken(self, trajectory_id):
        return max(turns for name, turns, _ in self.asked if name == trajectory_id)

    async def answer(self, turn):
        turns = num_turns(turn.spans)
        self.turns.append(turn)
        self.asked.append((turn.trajectory_id, turns, len(turn.response_ids)))
        if turns == self.holds_at:
            self.held.set()
            await self.go.wait()
        return self.script(turns)

    async def forget(self, trajectory_id):
        self.forgotten.append(trajectory_id)


def says(turns):
    return EnvironmentTurn(ids=SAYS, elapsed_s=0.5)


def ends_after(most):
    def script(turns):
        return EnvironmentTurn(ends=True, reward=2.0) if turns == most else says(turns)

    return script


def with_problem(name, *, length=200, stop_ids=STOP_IDS, **options):
    item = assignment(name, **options)
    sampling = SamplingParams(max_new_tokens=length, stop_ids=stop_ids, seed=7)
    return msgspec.structs.replace(item, sampling=sampling, problem=Problem(prompt="?"))


@asynccontextmanager
async def begun(folders, environments, *items, **options):
    """A replica that has taken these up."""
    async with serving(folders, environments=environments, **options) as (story, weights):
        await story.until(lambda s: s.admissible > 0)
        story.replica.start_assignments(items)
        yield story, weights


async def test_an_environment_has_the_first_word_and_one_after_each_turn_until_it_ends(folders):
    environments = Scripted(ends_after(3))
    async with begun(folders, environments, with_problem("a")) as (story, _):
        await story.until(lambda s: "a" in s.ended)
        spans = story.spans["a"]
        assert [turns for _, turns, _ in environments.asked] == [0, 1, 2, 3]
        assert spans[0].version is None
        assert story.ids["a"][:3] == SAYS.tolist()
        assert story.ended["a"].finish_reason is FinishReason.STOP
        await asyncio.sleep(0)
        assert environments.forgotten == ["a"]


async def test_a_reward_lies_with_the_tokens(folders):
    async with begun(folders, Scripted(ends_after(1)), with_problem("a")) as (story, _):
        await story.until(lambda s: "a" in s.ended)
        [segment] = story.folder.glob(f"{story.label}*.segment")
        pieces = [piece for piece in whole_frames(memoryview(segment.read_bytes())) if piece.trajectory_id == "a"]
        assert pieces[-1].reward == 2.0


async def test_who_waits_for_an_environment_holds_no_slot_and_the_turn_is_in_the_journal(folders):
    environments = Scripted(ends_after(1), holds_at=1)
    async with begun(
        folders, environments, with_problem("a"), reports_partials=False, partial_interval_s=60.0
    ) as (
        story,
        _,
    ):
        await story.until(lambda s: len(environments.asked) == 2)
        assert (await story.replica.survey()).kv_used == 0
        [journal] = story.folder.glob(f"{story.label}*.journal")
        noted = [piece for piece in whole_frames(memoryview(journal.read_bytes())) if piece.trajectory_id == "a"]
        assert noted[-1].end == environments.asked[-1][2]


@pytest.mark.parametrize("how", ["abort", "give_up"])
async def test_one_that_waits_is_ended_at_once_and_goes_on_elsewhere_with_the_same_question(folders, how):
    environments = Scripted(ends_after(2), holds_at=1)
    async with begun(folders, environments, with_problem("a")) as (story, _):
        await story.until(lambda s: len(environments.asked) == 2)
        await getattr(story.replica, how)(["a"])
        await story.until(lambda s: "a" in s.ended)
        assert story.ended["a"].finish_reason is FinishReason.ABORT
        assert not environments.forgotten, "it goes on"
        asked = environments.asked[-1]
        environments.go.set()
        story.replica.start_assignments([with_problem("a", tokens=story.tokens["a"])])
        await story.until(lambda s: story.ended["a"].finish_reason is FinishReason.STOP)
        assert environments.asked[2] == asked


async def test_a_replica_says_for_how_long_environments_alone_have_worked(folders):
    environments = Scripted(ends_after(3), holds_at=1)
    async with begun(folders, environments, with_problem("a"), with_problem("b", length=60)) as (story, _):
        assert (await story.replica.survey()).held_s == 0.0
        await story.until(lambda s: [turns for _, turns, _ in environments.asked].count(1) == 2)
        await asyncio.sleep(0.05)
        survey = await story.replica.survey()
        assert survey.held_s >= 0.05
        assert len(survey.running) == 2
        environments.go.set()
        await story.until(lambda s: len(s.ended) == 2)
        assert (await story.replica.survey()).held_s == 0.0


async def test_what_an_environment_goes_back_behind_is_not_in_the_next_request(folders):
    def script(turns):
        back = EnvironmentTurn(ids=SAYS, follows=NEW_CONVERSATION if turns == 2 else None)
        return ends_after(3)(turns) if turns != 2 else back

    async with begun(folders, Scripted(script), with_problem("a")) as (story, _):
        await story.until(lambda s: "a" in s.ended)
        branch = next(span for span in story.spans["a"] if span.follows is not None)
        assert branch.follows == NEW_CONVERSATION
        assert story.ids["a"][branch.start : branch.end] == SAYS.tolist()
        assert num_turns(story.spans["a"]) == 3
        first, second = sequences_of(story.spans["a"])
        assert (first.has_prompt, second.has_prompt) == (True, False)


async def test_new_weights_come_while_one_waits_and_its_next_turn_has_their_version(folders):
    environments = Scripted(ends_after(3), holds_at=1)
    async with begun(folders, environments, with_problem("a"), policy=OnNewWeights.RESUME) as (story, weights):
        await story.until(lambda s: len(environments.asked) == 2)
        await weights.publish(1)
        await story.until(lambda s: 1 in s.loads)
        environments.go.set()
        await story.until(lambda s: "a" in s.ended)
        versions = [span.version for span in story.spans["a"]]
        assert versions[:3] == [None, 0, None]
        assert set(versions[3:]) == {1, None}


def limits(most, *, turns=3):
    def script(taken):
        return msgspec.structs.replace(ends_after(turns)(taken), max_tokens=None if taken == turns else most)

    return script


async def test_turns_that_their_environment_limits_are_cut_and_the_trajectory_goes_on(folders):
    async with begun(folders, Scripted(limits(4)), with_problem("a", stop_ids=())) as (story, _):
        await story.until(lambda s: "a" in s.ended)
        assert story.ended["a"].finish_reason is FinishReason.STOP
        spans = story.spans["a"]
        assert [span.end - span.start for span in spans if span.version is not None] == [4, 4, 4]
        assert [span.turn_limit for span in spans] == [4, None] * 3


def words(ids):
    return "".join(f" {id};" for id in ids.tolist())


def stops(*strings, turns=3):
    def script(taken):
        return msgspec.structs.replace(ends_after(turns)(taken), stop=() if taken == turns else strings)

    return script


def turns_of(story, name):
    spans = merge_spans(story.spans[name])
    return [story.ids[name][span.start : span.end] for span in spans if span.version is not None]


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_turn_ends_with_the_token_that_completes_a_stop_string_and_the_trajectory_continues(
    folders, is_read
):
    environments = Scripted(stops("7;", "3; "))
    item = with_problem("a", stop_ids=(), length=4000)
    async with begun(folders, environments, item, decode=words, is_read=is_read) as (story, _):
        await story.until(lambda s: "a" in s.ended)
        assert story.ended["a"].finish_reason is FinishReason.STOP
        assert [span.stop for span in merge_spans(story.spans["a"])] == [("7;", "3; "), ()] * 3
        for turn in turns_of(story, "a"):
            text = words(np.array(turn))
            assert "7;" in text or "3; " in text
            text = words(np.array(turn[:-1]))
            assert "7;" not in text
            assert "3; " not in text
        logprobs = [len(turn.logprobs) for turn in environments.turns[1:]]
        assert logprobs == [len(turn) for turn in turns_of(story, "a")]


async def test_tokens_before_a_stop_string_are_those_that_the_engine_samples_without_it(folders):
    found = []
    for script in (stops("7;", turns=1), limits(200, turns=1)):
        item = with_problem("a", stop_ids=(), length=4000)
        async with begun(folders, Scripted(script), item, decode=words) as (story, _):
            await story.until(lambda s: "a" in s.ended)
            found += turns_of(story, "a")
    stopped, whole = found
    assert stopped == whole[: len(stopped)]


async def test_one_that_moves_when_a_stop_string_ended_its_turn_is_answered_there_and_samples_nothing_before(
    folders,
):
    environments = Scripted(stops("7;", turns=2), holds_at=1)
    item = with_problem("a", stop_ids=(), length=4000)
    async with begun(folders, environments, item, decode=words) as (story, _):
        await story.until(lambda s: len(environments.asked) == 2)
        await story.replica.abort(["a"])
        await story.until(lambda s: "a" in s.ended)
        environments.go.set()
        moved = with_problem("a", stop_ids=(), length=4000, tokens=story.tokens["a"])
        story.replica.start_assignments([moved])
        await story.until(lambda s: story.ended["a"].finish_reason is FinishReason.STOP)
        assert environments.asked[1] == environments.asked[2]
        assert len(environments.asked) == 4


@pytest.mark.parametrize("policy", [OnNewWeights.RESUME, OnNewWeights.RETRACT, OnNewWeights.IN_PLACE])
async def test_new_weights_within_a_turn_do_not_keep_it_from_its_stop_string(folders, policy):
    item = with_problem("a", stop_ids=(), length=4000)
    async with begun(folders, Scripted(stops(" 7; 1", turns=1)), item, decode=words, policy=policy) as (
        story,
        weights,
    ):
        await story.until(lambda s: len(s.ids["a"]) > len(SAYS))
        await weights.publish(1)
        await story.until(lambda s: "a" in s.ended)
        text = words(np.array(story.ids["a"][len(SAYS) :]))
        assert " 7; 1" in text
        assert " 7; 1" not in text[: text.rindex(" ")]
        assert story.spans["a"][-1].end == len(story.ids["a"])


async def test_a_limit_that_fills_the_response_ends_it(folders):
    environments = Scripted(limits(4))
    async with begun(folders, environments, with_problem("a", stop_ids=(), length=7)) as (story, _):
        await story.until(lambda s: "a" in s.ended)
        assert story.ended["a"].finish_reason is FinishReason.LENGTH
        assert len(environments.asked) == 1


async def test_one_that_moves_when_its_turn_is_cut_is_answered_there_and_samples_nothing_before(folders):
    environments = Scripted(limits(4, turns=2), holds_at=1)
    async with begun(folders, environments, with_problem("a", stop_ids=())) as (story, _):
        await story.until(lambda s: len(environments.asked) == 2)
        await story.replica.abort(["a"])
        await story.until(lambda s: "a" in s.ended)
        environments.go.set()
        story.replica.start_assignments([with_problem("a", stop_ids=(), tokens=story.tokens["a"])])
        await story.until(lambda s: story.ended["a"].finish_reason is FinishReason.STOP)
        assert environments.asked == [("a", 0, 0), ("a", 1, 7), ("a", 1, 7), ("a", 2, 14)]


async def test_a_failure_is_told_with_its_reason(folders):
    def script(turns):
        return EnvironmentTurn(failure=DropReason.ENVIRONMENT_LOST, detail="gone") if turns else says(turns)

    environments = Scripted(script)
    async with begun(folders, environments, with_problem("a")) as (story, _):
        told = []
        while not told:
            report = await story.replica.next_report(0.2)
            told = [one for one in report.progress if one.failure is not None]
        assert (told[0].failure, told[0].detail) == (DropReason.ENVIRONMENT_LOST, "gone")


@pytest.mark.parametrize(("options", "cap"), [({"length": 30}, None), ({}, Cap.TURNS)])
async def test_caps_end_it(folders, options, cap):
    def script(turns):
        return EnvironmentTurn(is_cut=True) if cap is not None and turns == 2 else says(turns)

    async with begun(folders, Scripted(script), with_problem("a", **options)) as (story, _):
        await story.until(lambda s: "a" in s.ended)
        end = story.ended["a"]
        assert (end.finish_reason, end.cut) == (FinishReason.LENGTH, cap)
        assert cap is not None or len(story.ids["a"]) == 30


async def test_first_words_that_leave_no_room_for_a_turn_drop_it(folders):
    def script(turns):
        return EnvironmentTurn(ids=np.arange(40, dtype=np.int32))

    async with begun(folders, Scripted(script), with_problem("a", length=30)) as (story, _):
        told = []
        while not told:
            report = await story.replica.next_report(0.2)
            told = [one for one in report.progress if one.failure is not None]
        assert told[0].failure is DropReason.ENVIRONMENT_FAILED
        assert "max_new_tokens=30" in told[0].detail


async def test_the_cap_on_seconds_counts_an_environment_and_ends_one_that_waits(folders):
    environments = Scripted(says, holds_at=1)
    async with begun(folders, environments, with_problem("a"), max_seconds=0.3) as (story, _):
        await story.until(lambda s: "a" in s.ended)
        end = story.ended["a"]
        assert (end.finish_reason, end.cut) == (FinishReason.LENGTH, Cap.SECONDS)


class EndsItsTurn:
    """An engine whose stream ends by itself at the very moment in which it is paused or aborted."""

    def __init__(self):
        self.moment = asyncio.Event()
        self.began = asyncio.Event()
        self.streams = 0

    async def generate(self, request):
        self.streams += 1
        self.began.set()
        await self.moment.wait()
        ids, reason = np.array([STOP_IDS[0]], np.int32), FinishReason.STOP
        yield Delta(rid=request.rid, ids=ids, logprobs=np.zeros(1, np.float32), version=0, finish_reason=reason)

    async def pause(self, mode):
        self.moment.set()

    async def abort(self, rid):
        self.moment.set()


class BreaksOff:
    """An engine that gives two tokens and no more of its first stream, and of others all that they may have."""

    def __init__(self):
        self.moment, self.began = asyncio.Event(), asyncio.Event()
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        room = request.sampling.max_new_tokens - len(request.prefix_ids)
        if len(self.requests) > 1:
            yield self.delta(request, room, FinishReason.LENGTH)
            return
        yield self.delta(request, 2, None)
        self.began.set()
        await self.moment.wait()
        yield self.delta(request, 0, FinishReason.ABORT)

    def delta(self, request, count, reason):
        ids, logprobs = np.full(count, VOCAB - 1, np.int32), np.zeros(count, np.float32)
        return Delta(rid=request.rid, ids=ids, logprobs=logprobs, version=0, finish_reason=reason)

    async def pause(self, mode):
        self.moment.set()

    async def abort(self, rid):
        self.moment.set()


class NoStore:
    def keep(self, piece):
        return TokensRef(piece.start, piece.end, make_ref())

    def journal(self, pieces):
        pass

    def forget(self, trajectory_id):
        pass


@asynccontextmanager
async def at_the_end_of_a_turn(*, engine=None, script=says, **options):
    """Streams with one trajectory in an engine that is about to end a turn of it."""
    engine, out = engine or EndsItsTurn(), Outbox(index=0, clock=SystemClock())
    environments = Scripted(script, holds_at=1)
    options |= {"on_ended": lambda: None, "on_lost": lambda error: None}
    streams = Streams(engine, out, NoStore(), environments, **options)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        streams.open(tasks)
        streams.serving.set()
        streams.start(with_problem("a"))
        await engine.began.wait()
        yield streams, environments, out
        streams.close()


async def test_a_turn_that_ends_as_new_weights_come_does_not_hold_them_up():
    async with at_the_end_of_a_turn() as (streams, environments, _):
        streams.serving.clear()
        interrupted = await streams.interrupt()
        streams.resume_interrupted(interrupted)
        await environments.held.wait()
        environments.go.set()
        await asyncio.sleep(0.05)
        assert [one.state for one in streams.running.values()] == [StreamState.OUTSIDE], "it waits for the weights"
        await streams.abort(["a"])


async def test_a_limited_turn_that_new_weights_interrupt_goes_on_to_its_limit_and_no_further():
    engine = BreaksOff()
    async with at_the_end_of_a_turn(engine=engine, script=limits(5)) as (streams, environments, _):
        streams.resume_interrupted(await streams.interrupt())
        await environments.held.wait()
        assert [request.sampling.max_new_tokens for request in engine.requests] == [8, 8]
        assert environments.asked == [("a", 0, 0), ("a", 1, len(SAYS) + 5)]
        await streams.abort(["a"])


async def test_a_stop_string_aborts_the_stream_and_no_later_token_counts():
    engine = BreaksOff()
    script = stops(f" {VOCAB - 1}; {VOCAB - 1};")
    async with at_the_end_of_a_turn(engine=engine, script=script, decode=words) as (streams, environments, _):
        await environments.held.wait()
        assert environments.asked == [("a", 0, 0), ("a", 1, len(SAYS) + 2)]
        environments.go.set()
        while len(environments.asked) < 3:  # noqa: ASYNC110 - its script has no event for this
            await asyncio.sleep(0.01)
        assert environments.asked[2] == ("a", 2, 2 * len(SAYS) + 4), "its second stream has far more tokens"
        await streams.abort(["a"])


@pytest.mark.parametrize("how", ["abort", "give_up"])
async def test_a_turn_that_ends_as_it_is_aborted_is_not_gone_on_with_here(how):
    async with at_the_end_of_a_turn() as (streams, environments, out):
        await getattr(streams, how)(["a"])
        await out.urgent.wait()
        assert not streams.running
        assert out.progress[-1].finish_reason is FinishReason.ABORT
        assert out.progress[-1].end == len(SAYS) + 1
        assert len(environments.asked) == 1


async def test_time_in_environments_is_told(folders):
    async with begun(folders, Scripted(ends_after(3)), with_problem("a"), reports_partials=False) as (story, _):
        await story.until(lambda s: "a" in s.ended)
        assert story.ended["a"].environment_s == pytest.approx(1.5)  # before the first turn, and after two
