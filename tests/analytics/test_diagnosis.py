"""The wall that binds, and what a change of a stage would give."""

from dataclasses import replace

import pytest

from laminar_py.config.loading import load_config
from laminar_py.config.rollout import Schedule
from laminar_py.observe.diagnosis import BoundSide, diagnose, wall_rows, what_if, what_if_set
from laminar_py.observe.mean_step import (
    Age,
    MeanStep,
    StageTimes,
    StepStage,
    Use,
    compose,
    expected_longest,
    predict,
)
from laminar_py.observe.remedies import Remedy, Wall, remedies
from tests.analytics.scripted import CONFIG, WITH_ENVIRONMENT


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


@pytest.mark.parametrize("schedule", [Schedule.ASYNC, Schedule.ONE_STEP])
def test_where_generation_is_95_percent_of_34_s_twice_the_learner_leaves_34_s(schedule):
    step = mean_step_of(schedule, measured_s=34.0, generation_s=0.95 * 34.0, learner_s=1.7)
    assert what_if(step, StepStage.LEARNER) == pytest.approx(34.0)
    assert what_if(step, StepStage.GENERATION) < 18.0
    assert diagnosis(step).binding.wall is Wall.GENERATION


def test_under_sync_the_same_saves_what_the_learner_took():
    step = mean_step_of(Schedule.SYNC, measured_s=34.0, generation_s=0.95 * 34.0, learner_s=1.7)
    assert what_if(step, StepStage.LEARNER) == pytest.approx(34.0 - 0.85)


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


WALLS = {
    Wall.GENERATION: {"generation_s": 9.8},
    Wall.LONG_TAIL: {"generation_s": 9.8, "tail_s": 7.0},
    Wall.ENVIRONMENT: {"generation_s": 2.0, "environment_s": 7.8},
    Wall.REWARD: {"reward_s": 9.8},
    Wall.REFERENCE: {"reference_s": 9.8},
    Wall.WEIGHTS: {"weights_s": 9.5},
    Wall.LEARNER: {"learner_s": 9.8},
    Wall.FRESHNESS: {"generation_s": 3.0, "learner_s": 4.0, "held_s": 7.0},
}


@pytest.mark.parametrize("wall", WALLS)
def test_the_stage_that_fills_the_step_is_named(wall):
    found = diagnosis(mean_step_of(**WALLS[wall]))
    assert found.binding.wall is wall
    assert found.binding.gain > 1.5
    assert found.next.wall is not wall


@pytest.mark.parametrize(
    ("cpu", "cores", "settings", "changes"),
    [
        (0.1, 64, (), ["1 -> 8"]),
        (0.4, 4, (), ["1 -> 3"]),
        (0.6, 2, (), []),
        (0.6, 2, ("cluster.address=auto",), ["1 -> 8"]),  # whose other machines are not seen
        (0.6, 0, (), ["1 -> 8"]),
    ],
)
def test_no_more_scorers_are_advised_than_there_are_idle_cores_for(cpu, cores, settings, changes):
    step = replace(mean_step_of(reward_s=9.8), use=replace(FULL, cpu=cpu, own_cpu=cpu, cores=cores))
    found = remedies(Wall.REWARD, load_config(CONFIG, ["reward.workers=1", *settings]), step)
    assert [one.change for one in found if one.key == "reward.workers"] == changes
    assert found


JUDGE = "{kind: judge, %s}"


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ([f"reward.use=[{JUDGE % 'servers: j'}]", "reward.servers={j: {model: m}}"], "1 -> 8"),
        ([f"reward.use=[{JUDGE % 'servers: j'}]", "reward.servers={j: {model: m, gpus: 0}}"], None),
        ([f"reward.use=[math, {JUDGE % 'urls: [http://10.0.0.4:30000/v1], model: m'}]"], "1 -> 8"),
        (["reward.use=[math]"], None),
    ],
)
def test_scorers_that_wait_for_servers_need_no_idle_cores(settings, change):
    step = replace(mean_step_of(reward_s=9.8), use=FULL)
    found = remedies(Wall.REWARD, load_config(CONFIG, ["reward.workers=1", *settings]), step)
    assert next((one.change for one in found if one.key == "reward.workers"), None) == change


def test_a_run_whose_trajectories_wait_for_environments_is_told_so():
    told = dict(wall_rows(diagnosis(mean_step_of(**WALLS[Wall.ENVIRONMENT]))))
    assert told["limited by"] == (
        "ENVIRONMENT: replicas wait for their trajectories' environments 78% of the time; about 3 are away at a"
        " time, p95 of a turn is 0.40 s"
    )
    assert "generation 2.00 s, environment 7.80 s" in told["a step"]
    assert told["without it"].startswith("at most 4.55 x the goodput")


@pytest.mark.parametrize(
    ("away", "overrides", "keys"),
    [
        (3.0, ("rollout.on_new_weights=drain",), ["rollout.batch_per_replica", "staleness.max_staleness"]),
        (3.0, ("rollout.on_new_weights=resume",), ["rollout.max_batch", "staleness.max_staleness"]),
        (5.0, (), ["environment.at_once", "environment.workers"]),  # of eight that may work
        (5.0, ("environment.at_once=64",), ["rollout.batch_per_replica", "staleness.max_staleness"]),
    ],
)
def test_against_environments_come_room_for_them_where_they_lack_it_and_others_in_the_slots(away, overrides, keys):
    step = replace(mean_step_of(**WALLS[Wall.ENVIRONMENT]), away=away)
    found = diagnosis(step, *overrides).binding.remedies
    assert [one.key for one in found][:2] == keys
    assert found[-1].key == "environment"


def test_where_no_core_is_idle_no_more_processes_of_environments_are_advised():
    step = replace(mean_step_of(**WALLS[Wall.ENVIRONMENT]), away=7.0, use=replace(FULL, own_cpu=0.5))
    assert "environment.workers" not in [one.key for one in diagnosis(step).binding.remedies]


def test_more_in_flight_shortens_environments_where_they_are_the_wall_and_generation_elsewhere():
    step, more = mean_step_of(**WALLS[Wall.ENVIRONMENT]), Remedy("rollout.max_batch", "64 -> 128", "")
    assert what_if_set(step, Wall.ENVIRONMENT, more) == pytest.approx(10.0 - 7.8 / 2)
    assert what_if_set(step, Wall.GENERATION, more) == pytest.approx(10.0 - 2.0 / 2)


def test_what_is_dropped_as_stale_counts_for_freshness():
    step = replace(mean_step_of(generation_s=9.8, learner_s=9.0), stale_share=0.6)
    assert diagnosis(step, "staleness.policies=[drop]").binding.wall is Wall.FRESHNESS


def test_groups_without_any_success_are_a_wall_once_they_are_most():
    step = mean_step_of(generation_s=9.8, learner_s=9.0)
    assert diagnosis(replace(step, hopeless_share=0.8)).binding.wall is Wall.SPARSE_REWARD
    assert diagnosis(replace(step, hopeless_share=0.4)).binding.wall is Wall.GENERATION
    assert diagnosis(replace(step, hopeless_share=1.0)).binding.wall is Wall.SPARSE_REWARD


def test_a_reference_pass_inside_the_learner_is_moved_out_of_it():
    inside = replace(mean_step_of(learner_s=9.8), reference_in_learner=True, reference_s=5.0)
    found = diagnosis(inside, "algorithm.kl_coef=0.01").binding
    assert found.wall is Wall.LEARNER
    assert found.remedies[0].key == "algorithm.reference_pass"


@pytest.mark.parametrize(
    ("wall", "overrides", "key"),
    [
        (Wall.REWARD, (), "reward.workers"),
        (Wall.LEARNER, ("learner.recompute=all",), "learner.recompute"),
        (Wall.LEARNER, (), "learner.world_size"),
        (Wall.WEIGHTS, ("relay.max_bytes_per_s=1e5",), "relay.max_bytes_per_s"),
        (Wall.WEIGHTS, (), "relay.topology"),
        (Wall.LONG_TAIL, (), "rollout.on_new_weights"),
        (Wall.FRESHNESS, (), "staleness.max_staleness"),
        (Wall.REWARD, ("schedule=sync",), "schedule"),
    ],
)
def test_the_first_remedy_is_a_key_of_the_config(wall, overrides, key):
    assert diagnosis(mean_step_of(**WALLS[wall]), *overrides).binding.remedies[0].key == key


FULL = Use(slots=0.31, kv=0.12, cpu=0.98, own_cpu=0.98, cores=2)


def on_full_cores(**times):
    """A run whose processes fill both cores."""
    return replace(mean_step_of(**times), use=FULL, cpu_s=9.8)


def test_on_full_cores_more_replicas_promise_at_most_a_tenth_and_the_cores_are_the_wall():
    idle = mean_step_of(generation_s=9.9)
    assert 10.0 / what_if(idle, StepStage.GENERATION) > 1.5
    full = on_full_cores(generation_s=9.9)
    for stage in StepStage:
        assert 10.0 / what_if(full, stage) <= 1.1
    found = diagnosis(full)
    assert found.binding.wall is Wall.CPU
    assert found.binding.gain < 2.0
    assert found.next.wall is Wall.GENERATION
    told = dict(wall_rows(found))
    assert told["limited by"] == (
        "CPU CORES: processes keep 98% of the 2 cores busy; most of a step takes generation"
    )
    assert told["in use"] == "31% of the engines' slots, 12% of their KV caches, 98% of 2 cores"
    assert told["it would take"].startswith("with twice the replicas 9.80 s")
    assert "rollout.replicas 2 -> 4" not in told["change first"]


def test_on_full_cores_what_saves_work_is_advised_before_more_machines():
    few = replace(on_full_cores(generation_s=9.9), crowded_share=0.9)
    assert [one.key for one in diagnosis(few).binding.remedies][:2] == ["rollout.max_batch", "cluster.address"]
    slow = replace(on_full_cores(learner_s=9.9), microbatches=9.0)
    assert [one.key for one in diagnosis(slow).binding.remedies][:2] == ["packer.max_tokens", "cluster.address"]


def test_replicas_that_are_busy_say_what_of_slots_and_kv_is_in_use():
    step = replace(mean_step_of(generation_s=9.9), use=replace(FULL, cpu=0.4))
    assert diagnosis(step).binding.evidence.startswith(
        "replicas are busy 99% of the time, with 31% of their slots and 12% of their KV caches in use;"
    )


@pytest.mark.parametrize(
    ("held_s", "lost", "side", "words"),
    [
        (7.0, 0.02, BoundSide.TIGHT, "is too tight: 60% of the goodput is lost to idle replicas and dropped work"),
        (0.0, 0.38, BoundSide.LOOSE, "is too loose: 38% of the weight is gone"),
        (0.0, 0.02, BoundSide.NEITHER, "is neither too tight nor too loose"),
    ],
)
def test_of_a_bound_it_is_told_whether_idle_replicas_or_lost_weight_bind(held_s, lost, side, words):
    busy = {"generation_s": 3.0, "learner_s": 4.0} if held_s else {"generation_s": 9.9, "learner_s": 9.9}
    step = replace(mean_step_of(held_s=held_s, **busy), age=Age(lost=lost, kl={"0": 1e-4, "3-4": 0.03}))
    found = diagnosis(step)
    assert found.bound.side is side
    told = dict(wall_rows(found))["staleness"]
    assert words in told
    assert "KL 0.0001, 0.03 nats at staleness 0, 3-4" in told


def test_data_that_is_mostly_too_old_is_a_wall_and_a_narrower_bound_its_remedy():
    step = replace(mean_step_of(generation_s=9.9, learner_s=9.9), age=Age(lost=0.38, kl={"3-4": 0.03}))
    found = diagnosis(step, "staleness.max_staleness=6").binding
    assert found.wall is Wall.STALE_DATA
    assert (found.remedies[0].key, found.remedies[0].change) == ("staleness.max_staleness", "6 -> 3")
    unbounded = diagnosis(step, "staleness.max_staleness=null")
    assert unbounded.binding.remedies[0].change == "none -> 4"
    assert "nothing bounds staleness" in dict(wall_rows(unbounded))["staleness"]


@pytest.mark.parametrize("wall", [Wall.FRESHNESS, Wall.LONG_TAIL, Wall.WEIGHTS])
@pytest.mark.parametrize("bound", [0, 1, 3, 5, 7, 8, 40])
def test_no_bound_above_eight_is_advised(wall, bound):
    found = diagnosis(mean_step_of(**WALLS[wall]), f"staleness.max_staleness={bound}").binding
    assert found.wall is wall
    advised = [one.change for one in found.remedies if one.key == "staleness.max_staleness"]
    assert len(advised) == (bound < 8)
    assert all(bound < int(change.split(" -> ")[1]) <= 8 for change in advised)
    assert found.remedies


@pytest.mark.parametrize("wall", [Wall.FRESHNESS, Wall.WEIGHTS])
def test_where_much_of_the_weight_is_gone_no_wider_bound_is_advised_nor_rarer_versions(wall):
    step = replace(mean_step_of(**WALLS[wall]), age=Age(lost=0.3, kl={}))
    found = diagnosis(step).binding
    assert found.wall is wall
    assert not {"staleness.max_staleness", "learner.publish_every"} & {one.key for one in found.remedies}


def test_slow_weights_have_a_remedy_left_where_settings_have_none():
    step = replace(mean_step_of(**WALLS[Wall.WEIGHTS]), age=Age(lost=0.3, kl={}))
    found = diagnosis(step, "learner.lora.rank=16", "relay.topology=auto")
    assert [one.key for one in found.binding.remedies] == ["relay.host"]
    assert "change first" in dict(wall_rows(found))


@pytest.mark.parametrize(
    ("schedule", "every", "why"),
    [
        ("async", 2, "fewer versions travel, with staleness.max_staleness=3"),
        ("async", 4, "fewer versions travel, with staleness.max_staleness=7"),
        ("async", 5, None),
        ("one_step", 4, "fewer versions travel, with staleness.max_staleness=8"),
        ("one_step", 5, None),
    ],
)
def test_rarer_versions_are_advised_while_what_they_make_stale_is_within_eight_steps(schedule, every, why):
    bound = every - (schedule == "async")
    step = mean_step_of(Schedule(schedule), **WALLS[Wall.WEIGHTS])
    found = diagnosis(step, f"learner.publish_every={every}", f"staleness.max_staleness={bound}").binding
    assert found.wall is Wall.WEIGHTS
    assert [one.why for one in found.remedies if one.key == "learner.publish_every"] == ([why] if why else [])


@pytest.mark.parametrize(("bound", "changes"), [(40, ["12 -> 9", "40 -> 8"]), (None, ["12 -> 5", "none -> 4"])])
def test_a_narrower_bound_that_rare_versions_forbid_comes_with_more_frequent_ones(bound, changes):
    step = replace(mean_step_of(generation_s=9.9, learner_s=9.9), age=Age(lost=0.6, kl={}))
    settings = ("learner.publish_every=12", f"staleness.max_staleness={'null' if bound is None else bound}")
    found = diagnosis(step, *settings).binding
    assert found.wall is Wall.STALE_DATA
    assert [one.change for one in found.remedies[:2]] == changes
    load_config(
        CONFIG,
        [f"{one.key}={one.change.split(' -> ')[1]}" for one in found.remedies[:2]],
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "repacking, which needs drain, ends with it"),
        (("repack.planner=paper",), "ends with it: leave out repack.planner=paper too"),
        (("repack.planner=none",), None),
    ],
)
def test_the_end_of_drain_says_that_repacking_ends_with_it(overrides, words):
    settings = ("rollout.on_new_weights=drain", *overrides)
    first = diagnosis(mean_step_of(**WALLS[Wall.LONG_TAIL]), *settings).binding.remedies[0]
    assert first.change == "drain -> resume"
    assert "repacking" not in first.why if words is None else words in first.why


@pytest.mark.parametrize(
    ("wall", "remedy", "step_s"),
    [
        (Wall.REWARD, Remedy("reward.workers", "2 -> 5", ""), 10.0 - 9.8 + 9.8 * 2 / 5),
        (Wall.WEIGHTS, Remedy("relay.max_bytes_per_s", "300000 -> 3000000, or none", ""), 10.0 - 9.5 * 0.9),
        (Wall.LONG_TAIL, Remedy("rollout.on_new_weights", "drain -> resume", ""), 10.0 - 7.0),
        (Wall.FRESHNESS, Remedy("staleness.max_staleness", "0 -> 2", ""), 4.0),
    ],
)
def test_a_remedy_is_predicted_at_the_very_value_that_it_sets(wall, remedy, step_s):
    assert what_if_set(mean_step_of(**WALLS[wall]), wall, remedy) == pytest.approx(step_s)


@pytest.mark.parametrize("wall", WALLS)
def test_on_full_cores_the_first_remedy_of_every_wall_promises_at_most_a_tenth(wall):
    step = on_full_cores(**WALLS[wall])
    config = load_config(CONFIG, ["relay.max_bytes_per_s=3e5", WITH_ENVIRONMENT])
    first = remedies(wall, config, step)[0]
    assert 1.0 <= step.measured_s / what_if_set(step, wall, first) <= 1.1


def test_every_remedy_names_a_setting_that_exists():
    steps = [mean_step_of(**times) for times in WALLS.values()]
    steps += [on_full_cores(generation_s=9.9), replace(steps[0], age=Age(lost=0.6, kl={}))]
    for step in steps:
        found = diagnosis(step, "learner.recompute=all", "relay.max_bytes_per_s=1e5")
        for remedy in (*found.binding.remedies, *found.next.remedies):
            section = type(load_config(CONFIG, []))
            for name in remedy.key.split("."):
                assert name in section.model_fields, remedy.key
                section = section.model_fields[name].annotation
                section = next(
                    (kind for kind in getattr(section, "__args__", ()) if kind is not type(None)), section
                )


def test_the_longest_of_many_is_that_of_the_order_statistics():
    assert expected_longest([], 4) == 0.0
    assert expected_longest([7, 7, 7], 4) == pytest.approx(7.0)
    assert expected_longest([0, 1], 3) == pytest.approx(1 - 0.5**3)


def test_a_diagnosis_is_told_in_lines_that_name_wall_remedy_and_schedule():
    told = dict(wall_rows(diagnosis(mean_step_of(learner_s=9.8, generation_s=2.0), "learner.recompute=all")))
    assert told["limited by"].startswith("LEARNER: the learner is busy 98%")
    assert told["change first"].startswith("learner.recompute: all -> none")
    assert "with schedule=sync 11.80 s" in told[""]
    assert told["it would take"] == "with twice the replicas 10.00 s, the learner ranks 5.10 s"


def test_a_step_in_which_no_stage_is_busy_is_told_too():
    told = dict(wall_rows(diagnosis(mean_step_of(generation_s=0.0, learner_s=0.0, held_s=10.0))))
    assert told["limited by"].startswith("FRESHNESS: replicas are idle 100%")
    assert "with twice" not in told


def test_a_limit_on_scoring_is_advised_only_where_it_is_shorter():
    found = diagnosis(mean_step_of(**WALLS[Wall.REWARD]), "reward.timeout_s=0.3").binding
    assert "reward.timeout_s" not in [remedy.key for remedy in found.remedies]
    found = diagnosis(mean_step_of(**WALLS[Wall.REWARD]), "reward.timeout_s=5").binding
    assert "reward.timeout_s" in [remedy.key for remedy in found.remedies]
