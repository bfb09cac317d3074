"""When sets are evaluated, and under which versions."""

import asyncio
from types import SimpleNamespace

from laminar_py.config.loading import load_config
from laminar_py.ledger.evaluations import OpenPass
from laminar_py.observe.stats import Stats, Totals
from laminar_py.records.evaluations import pass_number, set_of
from laminar_py.records.host import SystemClock
from laminar_py.records.trajectory import Kind
from laminar_py.runtime.orchestrator.evaluator import POINTS_KEPT, EvalPoint, Evaluator
from tests.builders import make_evaluated, make_prompt
from tests.control.fleet import Fleet, settle
from tests.runs.runs import REPO
from tests.workers.fakes import make_incarnation

PATIENCE_S = 60.0
SETS = "eval.sets={often: often.jsonl, rare: {path: rare.jsonl, every_steps: 4}}"


def make_evaluator(fleet, *settings):
    """An evaluator of two sets of a problem each, what it publishes, and the versions that it has held."""
    held, published = [], []

    async def hold(version):
        held.append(version)

    incarnation = make_incarnation(
        config=make_config(*settings),
        inputs=SimpleNamespace(sets={"often": [make_prompt(0)], "rare": [make_prompt(1)]}, first_of_tasks=[]),
        stats=Stats(SystemClock(), replicas=1, totals=Totals()),
    )
    evaluator = Evaluator(
        incarnation,
        scheduler=fleet.scheduler,
        replicas=SimpleNamespace(restart=lambda: None),
        dispatch_loop=SimpleNamespace(wake=lambda: None),
        hold=hold,
        publish=published.append,
        show_line=None,
    )
    return evaluator, published, held


def make_config(*settings):
    return load_config(REPO / "configs/quickstart.yaml", [SETS, *settings])


def sampling_of(config):
    return config.eval.sampling_by_set(config.rollout.sampling.params())


ASKED = sampling_of(make_config())


async def evaluate_until_done(fleet, work):
    """Do some work of an evaluator, all of whose questions are answered; the sets that were asked for."""
    asked, task = [], asyncio.create_task(work)
    async with asyncio.timeout(PATIENCE_S):
        while not task.done():
            asked += await evaluate_all(fleet)
            await settle()
        await task
    return asked


async def evaluate_all(fleet):
    """Answer everything that was asked for; the sets, in the order in which they were begun."""
    await fleet.report(0)
    items = [item for item in fleet.running[0].values() if item.kind is Kind.EVAL]
    await fleet.finish_all(0)
    await fleet.score_all(lambda index: 1.0)
    await settle()
    return [set_of(group) for group in sorted({item.group_id for item in items}, key=pass_number)]


async def test_each_set_is_evaluated_at_its_own_interval_and_all_before_and_after():
    fleet = Fleet(replicas=1)
    fleet.scheduler.pause()
    evaluator, published, _ = make_evaluator(fleet, "eval.every_steps=2")
    found = {}
    for step in range(1, 9):
        await evaluator.stepped(EvalPoint(0, step, float(step)), last=step == 8)
        if asked := await evaluate_all(fleet):
            found[step] = asked
    assert found == {2: ["often"], 4: ["often", "rare"], 6: ["often"]}
    finish = asyncio.create_task(evaluator.finish(EvalPoint(0, 8, 8.0)))
    async with asyncio.timeout(PATIENCE_S):
        while not (asked := await evaluate_all(fleet)):  # until the figures of those before are there
            await settle()
        await finish
    assert asked == ["often", "rare"]
    assert {(one.set_name, one.step) for one in published[-2:]} == {("often", 8), ("rare", 8)}
    assert len(published) == 6


async def test_a_step_after_a_second_and_at_an_interval_begins_one_pass_of_each_set():
    fleet = Fleet(replicas=1)
    fleet.scheduler.pause()
    evaluator, _, _ = make_evaluator(fleet, "eval.every_steps=2", "eval.at_seconds=[3.5, 3.7]")
    found = {}
    for step in range(1, 6):
        await evaluator.stepped(EvalPoint(0, step, float(step)), last=False)
        found[step] = await evaluate_all(fleet)
    assert found == {1: [], 2: ["often"], 3: [], 4: ["often", "rare"], 5: []}


async def test_deferred_marks_hold_the_version_that_was_the_newest_then():
    fleet = Fleet(replicas=1)
    fleet.scheduler.pause()
    evaluator, _, held = make_evaluator(fleet, "eval.at_seconds=[2.5]", "eval.deferred=true")
    for step in range(1, 5):
        await evaluator.stepped(EvalPoint(step, step, float(step)), last=False)
    assert 2 in held
    assert 3 not in held


async def test_deferred_versions_are_held_and_evaluated_with_their_sets_when_rl_is_over():
    fleet = Fleet(replicas=1)
    fleet.scheduler.pause()
    evaluator, _, held = make_evaluator(fleet, "eval.every_steps=2", "eval.deferred=true")
    for step in range(1, 5):
        await evaluator.stepped(EvalPoint(step, step, float(step)), last=False)
    assert held == [2, 4]
    assert fleet.scheduler.evaluations.counts == []


async def test_a_result_is_of_the_step_whose_weights_answered():
    fleet = Fleet(replicas=1)
    fleet.scheduler.pause()
    evaluator, published, _ = make_evaluator(fleet, "eval.every_steps=2")
    fleet.versions[0] = 1
    for step in (1, 2):
        await evaluator.stepped(EvalPoint(step, step, float(step)), last=False)
    await evaluate_all(fleet)
    async with asyncio.timeout(PATIENCE_S):
        while not published:
            await settle()
    assert [(one.version, one.step, one.rl_s) for one in published] == [(1, 1, 1.0)]


async def test_a_resumed_run_goes_on_with_open_passes_as_of_their_moments_and_does_none_twice():
    fleet = Fleet(replicas=1)
    fleet.scheduler.pause()
    evaluator, published, _ = make_evaluator(fleet, "eval.every_steps=2")
    fleet.versions[0] = 1
    passes = [
        OpenPass(id="e3-often", version=1, step=4, answers={}),
        OpenPass(id="e5-rare", version=None, step=None, answers={}),
        OpenPass(id="e6-gone", version=1, step=4, answers={}),  # a set that the config has no more
    ]
    evaluator.restore(passes, results=[], sampling=ASKED, now=EvalPoint(-1, 5, 50.0), passed_s={4: 40.0})
    evaluator.note_version(EvalPoint(1, 5, 51.0))
    assert await evaluate_all(fleet) == ["often", "rare"]
    async with asyncio.timeout(PATIENCE_S):
        while len(published) < 2:
            await settle()
        assert {(one.pass_id, one.version, one.step, one.rl_s) for one in published} == {
            ("e3-often", 1, 4, 40.0),
            ("e5-rare", 1, 5, 51.0),
        }
        finish = asyncio.create_task(evaluator.finish(EvalPoint(1, 5, 51.0)))
        while not (asked := await evaluate_all(fleet)):
            await settle()
        await finish
    assert asked == ["often"], "the other set has its result of this step"


async def test_a_resumed_run_does_no_pass_again_that_is_on_record_but_those_of_steps_that_are_undone():
    results = [make_evaluated(set_name="often", step=5), make_evaluated(set_name="rare", step=7, index=1)]
    fleet = Fleet(replicas=1)
    fleet.scheduler.pause()
    evaluator, _, _ = make_evaluator(fleet)
    evaluator.restore([], results=results, sampling=ASKED, now=EvalPoint(-1, 5, 50.0), passed_s={})
    evaluator.note_version(EvalPoint(0, 5, 50.0))
    assert await evaluate_until_done(fleet, evaluator.finish(EvalPoint(0, 5, 50.0))) == ["rare"]
    evaluator.note_version(EvalPoint(1, 7, 70.0))
    fleet.versions[0] = 1
    assert await evaluate_until_done(fleet, evaluator.finish(EvalPoint(1, 7, 70.0))) == ["often", "rare"]


async def test_a_run_that_was_stopped_in_its_first_evaluation_goes_on_with_that():
    fleet = Fleet(replicas=1)
    fleet.scheduler.pause()
    evaluator, published, _ = make_evaluator(fleet)
    evaluator.restore(
        [OpenPass(id="e3-often", version=0, step=0, answers={})],
        results=[make_evaluated(set_name="rare", step=0)],
        sampling=ASKED,
        now=EvalPoint(-1, 0, 0.0),
        passed_s={0: 0.0},
    )
    evaluator.note_version(EvalPoint(0, 0, 0.0))
    assert await evaluate_until_done(fleet, evaluator.first(EvalPoint(0, 0, 0.0))) == ["often"]
    assert [(one.pass_id, one.rl_s) for one in published] == [("e3-often", 0.0)]


async def test_a_pass_of_a_set_that_is_asked_otherwise_now_is_left():
    fleet = Fleet(replicas=1)
    fleet.scheduler.pause()
    evaluator, _, _ = make_evaluator(fleet)
    before = sampling_of(make_config("eval.sets.often={path: often.jsonl, samples: 4, temperature: 1}"))
    passes = [OpenPass(id=f"e{place}-{name}", version=0, step=4, answers={}) for place, name in enumerate(before)]
    evaluator.restore(passes, results=[], sampling=before, now=EvalPoint(-1, 4, 40.0), passed_s={4: 40.0})
    assert await evaluate_all(fleet) == ["rare"]


def test_steps_of_old_versions_are_forgotten():
    evaluator, _, _ = make_evaluator(Fleet(replicas=1))
    for version in range(3 * POINTS_KEPT):
        evaluator.note_version(EvalPoint(version, version, float(version)))
    assert list(evaluator._points_by_version) == list(range(2 * POINTS_KEPT, 3 * POINTS_KEPT))
