"""The bottleneck that binds, and what a change of a stage would give."""

from dataclasses import replace

import pytest

from laminar_lab.report.diagnosis import Bottleneck, describe_diagnosis, diagnose
from laminar_lab.report.mean_step import (
    Age,
    MeanStep,
    StageTimes,
    StepStage,
    Use,
    compose,
    expected_longest,
    predict,
)
from laminar_py.config.loading import load_config
from laminar_py.config.rollout import Schedule
from laminar_py.records.engine import DraftCounts
from tests.report.scripted import CONFIG, WITH_ENVIRONMENT


def mean_step_of(schedule=Schedule.ASYNC, *, measured_s=10.0, held_s=0.0, **times):
    """A run whose stages take these seconds, and where nothing else is wrong."""
    stages = StageTimes(**{"generation_s": 0.1, "learner_s": 0.1, **times})
    return MeanStep(
        schedule=schedule,
        steps=20,
        measured_s=measured_s,
        times=stages,
        reference_s=stages.reference_s,
        reference_in_learner=False,
        waited_s=max(0.0, measured_s - stages.learner_s),
        held_s=held_s,
        longest_s=stages.generation_s,
        stale_share=0.0,
        hopeless_share=0.0,
        length_ratio=4.0,
        crowded_share=0.0,
        away=3.0,
        turn_p95_s=0.4,
        group_p90_s=0.5,
        reward_p95_s=0.2,
        transfer_s=0.0,
        load_s=0.0,
        microbatches=2.0,
        use=None,
        cpu_s=0.0,
        age=Age(lost=0.0, kl={}),
    )


def diagnosis(step, *overrides):
    environment = [WITH_ENVIRONMENT] if step.times.environment_s else []
    return diagnose(step, load_config(CONFIG, [f"schedule={step.schedule}", *environment, *overrides]))


@pytest.mark.parametrize(
    ("schedule", "step_s"), [(Schedule.SYNC, 5 + 3 + 1), (Schedule.ONE_STEP, 5 + 1), (Schedule.ASYNC, 5 + 1)]
)
@pytest.mark.parametrize("environment_s", [0.0, 2.0])
def test_stages_add_up_or_hide_each_other_as_the_schedule_has_it(schedule, step_s, environment_s):
    generation_s = 5.0 - environment_s  # turns of both follow one another
    times = StageTimes(
        generation_s=generation_s, environment_s=environment_s, reward_s=2.0, learner_s=3.0, weights_s=1.0
    )
    assert compose(schedule, times) == step_s


def test_slack_stays_when_a_stage_is_faster():
    now = StageTimes(generation_s=4.0, learner_s=2.0)
    then = now.faster(StepStage.GENERATION, 2)
    assert predict(Schedule.ASYNC, measured_s=5.0, now=now, then=then) == pytest.approx(2.0 + 1.0)


@pytest.mark.parametrize("stage", list(StepStage))
def test_where_stages_overlapped_more_than_the_schedule_says_less_of_one_is_never_a_loss(stage):
    now = StageTimes(generation_s=4.0, reward_s=1.0, learner_s=4.0, weights_s=1.0)
    assert predict(Schedule.SYNC, measured_s=6.0, now=now, then=now) == 6.0
    then = predict(Schedule.SYNC, measured_s=6.0, now=now, then=now.without(stage))
    assert 0.0 < then <= 6.0


def test_more_replicas_do_not_shorten_the_tail():
    times = StageTimes(generation_s=4.0, tail_s=3.0)
    assert times.faster(StepStage.GENERATION, 2).generation_s == pytest.approx(3.5)
    assert times.without(StepStage.GENERATION).generation_s == 3.0
    assert times.without_tail().generation_s == 1.0


BOTTLENECKS = {
    Bottleneck.GENERATION: {"generation_s": 9.8},
    Bottleneck.LONG_TAIL: {"generation_s": 9.8, "tail_s": 7.0},
    Bottleneck.ENVIRONMENT: {"generation_s": 2.0, "environment_s": 7.8},
    Bottleneck.REWARD: {"reward_s": 9.8},
    Bottleneck.REFERENCE: {"reference_s": 9.8},
    Bottleneck.WEIGHTS: {"weights_s": 9.5},
    Bottleneck.LEARNER: {"learner_s": 9.8},
    Bottleneck.FRESHNESS: {"generation_s": 3.0, "learner_s": 4.0, "held_s": 7.0},
}


@pytest.mark.parametrize("bottleneck", BOTTLENECKS)
def test_the_stage_that_fills_the_step_is_named(bottleneck):
    found = diagnosis(mean_step_of(**BOTTLENECKS[bottleneck]))
    assert found.binding.bottleneck is bottleneck
    assert found.binding.gain > 1.5
    assert found.next.bottleneck is not bottleneck


def test_a_run_whose_trajectories_wait_for_environments_is_told_so():
    told = dict(describe_diagnosis(diagnosis(mean_step_of(**BOTTLENECKS[Bottleneck.ENVIRONMENT]))))
    assert told["limited by"] == (
        "ENVIRONMENT: replicas wait for their trajectories' environments 78% of the time; about 3 are away at a"
        " time, p95 of a turn is 0.40 s"
    )
    assert "generation 2.00 s, environment 7.80 s" in told["a step"]
    assert told["without it"].startswith("at most 4.55 x the goodput")


def test_drafts_that_are_hardly_ever_accepted_are_called_useless():
    step = mean_step_of(generation_s=9.8)
    assert "drafts" not in dict(describe_diagnosis(diagnosis(step)))
    few = replace(step, drafts=DraftCounts(drafted_sibling=100, accepted_sibling=10, verified=110))
    assert dict(describe_diagnosis(diagnosis(few)))["drafts"] == (
        "10% of the drafted tokens are accepted, 0.10 in a pass of a sequence; useless here: set"
        " rollout.engine.speculation=none"
    )
    many = replace(
        step,
        drafts=DraftCounts(drafted_own=100, accepted_own=80, verified=120),
        speedups={1: 2.5, 4: 1.25},
    )
    assert dict(describe_diagnosis(diagnosis(many)))["drafts"] == (
        "80% of the drafted tokens are accepted, 2.00 in a pass of a sequence; engines are faster by 2.50 x with"
        " 1, 1.25 x with 4 sequences at a time"
    )


def test_what_is_dropped_as_stale_counts_for_freshness():
    step = replace(mean_step_of(generation_s=9.8, learner_s=9.0), stale_share=0.6)
    assert diagnosis(step, "staleness.policies=[drop]").binding.bottleneck is Bottleneck.FRESHNESS


def test_groups_without_any_success_are_a_wall_once_they_are_most():
    step = mean_step_of(generation_s=9.8, learner_s=9.0)
    assert diagnosis(replace(step, hopeless_share=0.8)).binding.bottleneck is Bottleneck.SPARSE_REWARD
    assert diagnosis(replace(step, hopeless_share=0.4)).binding.bottleneck is Bottleneck.GENERATION
    assert diagnosis(replace(step, hopeless_share=1.0)).binding.bottleneck is Bottleneck.SPARSE_REWARD


FULL = Use(slots=0.31, kv=0.12, cpu=0.98, own_cpu=0.98, cores=2)


def on_full_cores(**times):
    """A run whose processes fill both cores."""
    return replace(mean_step_of(**times), use=FULL, cpu_s=9.8)


def test_replicas_that_are_busy_say_what_of_slots_and_kv_is_in_use():
    step = replace(mean_step_of(generation_s=9.9), use=replace(FULL, cpu=0.4))
    assert diagnosis(step).binding.evidence.startswith(
        "replicas are busy 99% of the time, with 31% of their slots and 12% of their KV caches in use;"
    )


@pytest.mark.parametrize(
    ("held_s", "lost", "words"),
    [
        (7.0, 0.02, "is too tight: 60% of the goodput is lost to idle replicas and dropped work"),
        (0.0, 0.38, "is too loose: old data costs 38% of the effective sample size"),
        (0.0, 0.02, "is neither too tight nor too loose"),
    ],
)
def test_of_a_bound_it_is_told_whether_idle_replicas_or_lost_weight_bind(held_s, lost, words):
    busy = {"generation_s": 3.0, "learner_s": 4.0} if held_s else {"generation_s": 9.9, "learner_s": 9.9}
    step = replace(mean_step_of(held_s=held_s, **busy), age=Age(lost=lost, kl={"0": 1e-4, "3-4": 0.03}))
    told = dict(describe_diagnosis(diagnosis(step)))["staleness"]
    assert words in told
    assert "KL 0.0001, 0.03 nats at staleness 0, 3-4" in told


def test_the_longest_of_many_is_that_of_the_order_statistics():
    assert expected_longest([], 4) == 0.0
    assert expected_longest([7, 7, 7], 4) == pytest.approx(7.0)
    assert expected_longest([0, 1], 3) == pytest.approx(1 - 0.5**3)


def test_a_step_in_which_no_stage_is_busy_is_told_too():
    told = dict(describe_diagnosis(diagnosis(mean_step_of(generation_s=0.0, learner_s=0.0, held_s=10.0))))
    assert told["limited by"].startswith("FRESHNESS: replicas are idle 100%")
    assert "with twice" not in told


def test_on_full_cores_the_cores_are_the_bottleneck():
    found = diagnosis(on_full_cores(generation_s=9.9))
    assert found.binding.bottleneck is Bottleneck.CPU
    assert found.binding.gain < 2.0
    assert found.next.bottleneck is Bottleneck.GENERATION
    told = dict(describe_diagnosis(found))
    assert told["limited by"] == (
        "CPU CORES: processes keep 98% of the 2 cores busy; most of a step takes generation"
    )
    assert told["in use"] == "31% of the engines' slots, 12% of their KV caches, 98% of 2 cores"


def test_a_run_without_a_bound_is_told_so():
    step = replace(mean_step_of(generation_s=9.9), age=Age(lost=0.38, kl={"3-4": 0.03}))
    told = dict(describe_diagnosis(diagnosis(step, "staleness.max_staleness=null")))
    assert "nothing bounds staleness" in told["staleness"]


def test_data_above_the_bound_of_its_run_is_told_as_such_and_data_within_is_not():
    """A run with `max_staleness: 4` that was resumed with a smaller step trained on data 5 steps old."""
    step = mean_step_of(generation_s=9.9, learner_s=9.9)
    bounds = ["staleness.max_staleness=4", "staleness.policies=[wait]"]
    for oldest, words in (
        (4, "is neither too tight nor too loose"),
        (5, "data above it were up to 5 learner steps old"),
    ):
        found = diagnosis(replace(step, age=Age(lost=0.0, kl={}, oldest=oldest)), *bounds)
        assert words in dict(describe_diagnosis(found))["staleness"]


def test_a_run_whose_stages_keep_pace_is_not_limited_by_one_of_them():
    """The user read "limited by GENERATION" beside "learner is busy 96%" and "at most 1.04 x"."""
    told = dict(describe_diagnosis(diagnosis(mean_step_of(generation_s=9.99, learner_s=9.6))))
    assert told["limited by"] == (
        "NOTHING BY 10 %: generation takes 100% of a step, learner takes 96% of a step; without generation at most"
        " 1.04 x the goodput"
    )
    assert "without it" not in told
    told = dict(describe_diagnosis(diagnosis(mean_step_of(generation_s=9.9, learner_s=5.0))))
    assert told["limited by"].startswith("GENERATION: replicas are busy 99% of the time")
