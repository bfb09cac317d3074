"""Scoring of a run, with a real scheduler and stage and a reward in this process; and the first evaluation."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from laminar_py.config.loading import load_config
from laminar_py.observe.stats import Stats, Totals
from laminar_py.records.events import Dropped
from laminar_py.records.host import SystemClock
from laminar_py.records.scoring import Score, TermValue
from laminar_py.records.trajectory import DropReason
from laminar_py.runtime.orchestrator import scoring as scoring_module
from laminar_py.runtime.orchestrator.controller import collect_scores
from laminar_py.runtime.orchestrator.evaluator import EvalPoint, Evaluator
from laminar_py.runtime.orchestrator.scoring import Scoring
from laminar_py.runtime.orchestrator.setup import Handoff
from tests.builders import make_prompt
from tests.control.fleet import Fleet
from tests.runs.runs import REPO
from tests.workers.fakes import make_incarnation

PATIENCE_S = 20
LOST = object()  # value of a response that cannot be read
STEP = 32


class Scorers:
    """Stands for the processes; `reward` gives a value or None."""

    concurrency = 64
    names = ()  # of the values in a score

    def __init__(self, reward):
        self._reward = reward
        self._scores = asyncio.Queue()
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self):
        return [self]

    async def submit_responses(self, responses):
        for one in responses:
            score = self._scored(one.request, self._reward(one.request))
            end = f"end of {one.id}" if one.wants_sample else ""
            self._scores.put_nowait(msgspec.structs.replace(score, sample=end))

    def publish_addresses(self, addresses):
        raise AssertionError("nothing is launched")

    async def next_scores(self):
        await self.gate.wait()
        return [await self._scores.get()]

    def _scored(self, request, value):
        if value is LOST:
            lost = {"failure": DropReason.TOKENS_LOST, "detail": "its segment is gone"}
            return Score(trajectory_id=request.trajectory_id, value=None, **lost)
        failure = DropReason.REWARD_FAILED if value is None else None
        detail = "" if failure is None else "KeyError: 4 (at mine.py:2)"
        terms = [TermValue(name=name, value=value) for name in self.names if value is not None]
        return Score(trajectory_id=request.trajectory_id, value=value, terms=terms, failure=failure, detail=detail)

    async def restart(self, index):
        raise AssertionError(f"worker {index} was restarted")


@asynccontextmanager
async def scoring_of(monkeypatch, reward, *, prompts, view=None, names=(), use="mine.py:score"):
    """Scoring, a fleet whose finished responses go there, the scorers, and what the user is told."""
    config = load_config(
        REPO / "configs/quickstart.yaml",
        ["rollout.prompts_per_step=8", "rollout.group_size=4", f"reward.use=[{use}]"],
    )
    told, ends = [], []
    fleet, scorers = Fleet(replicas=1, batch=8, capacity=64), Scorers(reward)
    scorers.names = names
    monkeypatch.setattr(scoring_module, "Scorers", lambda incarnation, segments: scorers)
    tokenizer = SimpleNamespace(encode=lambda text: np.empty(0, np.int32), eos_ids=(1,))
    incarnation = make_incarnation(
        config=config,
        inputs=SimpleNamespace(first_of_tasks=prompts, sets={}, tokenizer=tokenizer),
        stats=Stats(SystemClock(), replicas=1, totals=Totals()),
        clock=SystemClock(),
    )
    fleet.woken, fleet.deliveries, scores = asyncio.Event(), 0, Handoff()

    async def deliver(batch):
        fleet.deliveries += 1
        await scores.hand_over(batch)
        fleet.deliveries -= 1

    scoring = Scoring(
        incarnation,
        scheduler=fleet.scheduler,
        segments=None,
        deliver=deliver,
        view=view or SimpleNamespace(notice=told.append, shows_samples=False),
        end=ends.append,
    )
    await scoring.start()
    dispatch_loop = SimpleNamespace(wake=fleet.woken.set)
    loop = collect_scores(scores, scheduler=fleet.scheduler, scoring=scoring, dispatch_loop=dispatch_loop)
    task = asyncio.gather(scoring.run(), loop)
    try:
        yield scoring, fleet, scorers, told, ends
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def score_all(scoring, fleet):
    """Have all that is finished scored, and the scores taken in."""
    while fleet.unscored:
        scoring.submit_response(fleet.unscored.pop(), make_prompt())
    async with asyncio.timeout(PATIENCE_S):
        while scoring.waits or fleet.deliveries:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_reward_is_tried_before_there_is_a_response_and_a_trial_ends_nothing(monkeypatch):
    prompts = [msgspec.structs.replace(make_prompt(index), task=task) for index, task in enumerate("ab")]
    tried = []
    reward = lambda request: tried.append(request.trajectory_id)  # noqa: E731 - None for each
    async with scoring_of(monkeypatch, reward, prompts=prompts) as (scoring, fleet, _, told, ends):
        await score_all(scoring, fleet)
        assert tried == ["trial/0", "trial/1", "trial/2", "trial/3"]
        assert (told, ends) == (
            [
                "reward.use=mine.py:score: fails on the right answer to prompt 'p0' of task 'a' (a trial,"
                " made up): KeyError: 4 (at mine.py:2)"
            ],
            [],
        ), "the same complaint is told once"
        assert scoring.failures.text == "", "no response of a model has failed"
        assert not fleet.log.events


@pytest.mark.parametrize(
    ("verdict", "names", "complaint"),
    [
        ("true", ["mine.py:score"], None),
        ("right", ["form", "right"], None),
        ("true", ["form", "right"], "verdict=true: no value has the name mine.py:score,"),
        ("rigth", ["form", "right"], "verdict=rigth: no value has the name rigth,"),
    ],
)
async def test_a_verdict_that_no_value_has_is_told_once_at_the_start(monkeypatch, verdict, names, complaint):
    use = f"{{kind: function, path: 'mine.py:score', verdict: {verdict}}}"
    prompts = [make_prompt(0), make_prompt(1)]
    async with scoring_of(monkeypatch, lambda _: 1.0, prompts=prompts, names=names, use=use) as parts:
        scoring, fleet, _, told, ends = parts
        await score_all(scoring, fleet)
    whole = (
        f"reward.use: mine.py:score: {complaint} so evaluations have no accuracy; set verdict to the value that is"
        " right (1) or wrong (0): form or right"
    )
    assert (told, ends) == ([whole] if complaint else [], [])


async def test_the_first_failure_is_told_at_once_and_a_step_of_them_ends_the_run(monkeypatch):
    async with scoring_of(monkeypatch, lambda request: None, prompts=[]) as (scoring, fleet, _, told, ends):
        await fleet.report(0)
        await fleet.finish_all(0)
        fleet.unscored, rest = fleet.unscored[:1], fleet.unscored[1:]
        (first,) = fleet.unscored
        await score_all(scoring, fleet)
        assert told == [f"reward.use=mine.py:score: {first.id} could not be scored: KeyError: 4 (at mine.py:2)"]
        assert ends == []
        for trajectory in rest[: STEP - 1]:
            scoring.submit_response(trajectory, make_prompt())
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(told) == 1
        assert f"no response could be scored ({STEP} of {STEP} failed)" in ends[0]
        dropped = [event for event in fleet.log.events if isinstance(event, Dropped)]
        assert {event.reason for event in dropped} == {DropReason.REWARD_FAILED}, "each on record (law 6)"


async def test_what_scores_make_room_for_is_handed_out_at_once(monkeypatch):
    async with scoring_of(monkeypatch, lambda request: 1.0, prompts=[]) as (scoring, fleet, _, _, _):
        await fleet.report(0)
        await fleet.finish_all(0)
        assert not fleet.woken.is_set()
        await score_all(scoring, fleet)
        assert fleet.woken.is_set(), "under one_step the last score of a batch opens the next"


async def test_a_response_that_no_scorer_can_read_is_begun_anew_and_is_no_failure_of_the_reward(monkeypatch):
    def reward(request):
        return LOST if request.trajectory_id == "g0.0" else 1.0

    async with scoring_of(monkeypatch, reward, prompts=[]) as (scoring, fleet, _, told, ends):
        await fleet.report(0)
        for index in range(4):
            await fleet.finish(0, f"g0.{index}")
        await score_all(scoring, fleet)
        (dropped,) = [event for event in fleet.log.events if isinstance(event, Dropped)]
        assert (dropped.trajectory_id, dropped.reason) == ("g0.0", DropReason.TOKENS_LOST)
        assert dropped.detail == "its segment is gone"
        assert "g0.4" in fleet.scheduler.state.live
        assert (told, ends, scoring.failures.text) == ([], [], "")


async def test_a_terminal_gets_one_sample_of_many_responses_and_the_next_after_a_while(monkeypatch):
    shown = []
    view = SimpleNamespace(shows_samples=True, sample=shown.append)
    async with scoring_of(monkeypatch, lambda request: 0.5, prompts=[], view=view) as (scoring, fleet, *_):
        await fleet.report(0)
        await fleet.finish_all(0)
        assert len(fleet.unscored) > 4
        late = fleet.unscored.pop(0)
        first = fleet.unscored[-1]
        await score_all(scoring, fleet)
        assert [(one.response, one.reward) for one in shown] == [(f"end of {first.id}", 0.5)]
        monkeypatch.setattr(scoring_module, "SAMPLE_EVERY_S", 0.0)
        fleet.unscored.append(late)
        await score_all(scoring, fleet)
        assert shown[-1].response == f"end of {late.id}"
        assert shown[-1].prompt


async def test_an_outage_keeps_what_waits_and_the_first_value_ends_its_rest(monkeypatch):
    monkeypatch.setattr(scoring_module, "OUTAGE_REST_S", 3600.0)
    async with scoring_of(monkeypatch, lambda request: 1.0, prompts=[]) as (scoring, fleet, scorers, _, _):
        scoring.failures.is_outage = True
        scorers.gate.clear()
        await fleet.report(0)
        await fleet.finish_all(0)
        count, name = len(fleet.unscored), fleet.unscored[0].id
        failed = Score(trajectory_id=name, value=None, failure=DropReason.REWARD_FAILED, detail="down")
        rest = asyncio.create_task(scoring._deliver([failed]))  # another scorer
        while fleet.unscored:
            scoring.submit_response(fleet.unscored.pop(), make_prompt())
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(scoring._stage._waiting) == count - 1, "one is tried"
        assert not rest.done()
        scorers.gate.set()
        await asyncio.wait_for(rest, PATIENCE_S)
        assert not scoring.failures.is_outage
        await score_all(scoring, fleet)


async def test_what_waits_for_a_score_is_told_with_the_age_of_the_oldest(monkeypatch):
    async with scoring_of(monkeypatch, lambda request: 1.0, prompts=[]) as (scoring, fleet, scorers, _, _):
        scorers.gate.clear()
        await fleet.report(0)
        await fleet.finish_all(0)
        count = len(fleet.unscored)
        while fleet.unscored:
            scoring.submit_response(fleet.unscored.pop(), make_prompt())
        assert scoring.waits == f"scores of {count} responses, the oldest 0 s"
        await asyncio.sleep(0)
        assert scoring.waits.startswith(f"scores of {count} responses"), "those that a worker has are among them"
        scorers.gate.set()
        await score_all(scoring, fleet)
        assert scoring.waits == ""


async def test_an_evaluation_of_which_nothing_could_be_scored_has_no_figure_and_is_told():
    fleet, published, told = Fleet(replicas=1), [], []
    fleet.scheduler.pause()
    incarnation = make_incarnation(
        config=load_config(REPO / "configs/quickstart.yaml", []),
        inputs=SimpleNamespace(sets={"heldout": [make_prompt()]}, first_of_tasks=[make_prompt()]),
        stats=Stats(SystemClock(), replicas=1, totals=Totals()),
    )
    evaluator = Evaluator(
        incarnation,
        scheduler=fleet.scheduler,
        replicas=None,
        dispatch_loop=SimpleNamespace(wake=lambda: None),
        hold=None,
        publish=published.append,
        show_line=told.append,
    )
    first = asyncio.create_task(evaluator.first(EvalPoint(0, 0, 0.0)))
    await asyncio.sleep(0)
    await fleet.report(0)
    await fleet.finish_all(0)
    id = fleet.unscored.pop().id
    failed = Score(trajectory_id=id, value=None, failure=DropReason.REWARD_FAILED)
    await fleet.scheduler.incoming.on_score(failed)
    async with asyncio.timeout(PATIENCE_S):
        await first
    assert (published, told) == ([], ["heldout: no figures at step 0: none of 1 answers could be scored"])
