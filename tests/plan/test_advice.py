"""Advice against the bottleneck of a run: which settings to change, and what a change would give."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from laminar_lab.advice import Remedy, advise_changes, remedies, steps_under, what_if, what_if_set
from laminar_lab.commands.advise import app
from laminar_lab.report.diagnosis import Bottleneck, diagnose
from laminar_lab.report.mean_step import Age, StepStage
from laminar_py.config.loading import load_config
from laminar_py.config.rollout import Schedule
from laminar_py.records.events import Leased
from tests.report.builders import make_step_row, write_rows
from tests.report.scripted import CONFIG, WITH_ENVIRONMENT, scripted
from tests.report.test_diagnosis import BOTTLENECKS, FULL, mean_step_of, on_full_cores

LAST = ["rollout.replicas", "cluster.address"]  # where all cores are full
JUDGE = "{kind: judge, %s}"


def advised(step, *overrides):
    """The bottleneck of a run with this mean step, and the remedies against it."""
    environment = [WITH_ENVIRONMENT] if step.times.environment_s else []
    config = load_config(CONFIG, [f"schedule={step.schedule}", *environment, *overrides])
    bottleneck = diagnose(step, config).binding.bottleneck
    return SimpleNamespace(bottleneck=bottleneck, remedies=remedies(bottleneck, config, step))


async def test_the_command_names_what_to_change_and_predicts_a_step(tmp_path):
    async with scripted(tmp_path) as script:
        for step in range(1, 4):
            at, id = 10.0 * step, f"g{step}.0"
            script.issue(at, id)
            script.finish(at + 1, id)
            script.score(at + 1.5, id)
            script.step(at + 9.5, step, id, waited_s=1.0)
    done = CliRunner().invoke(app, [str(tmp_path)], catch_exceptions=False)
    for words in ("limited by LEARNER: ", "learner.world_size", "twice the learner ranks", "schedule=sync"):
        assert words in done.output


@pytest.mark.parametrize(
    ("elapsed_s", "settings", "keys"),
    [
        (0.5, (), ["cluster.lease.cache", "cluster.lease.switch"]),
        (0.5, ("cluster.lease.switch=tail",), ["cluster.lease.cache"]),
        (0.5, ("cluster.lease.cache=keep",), ["cluster.lease.switch"]),
        (0.5, ("learner.lora={rank: 8}",), ["cluster.lease.switch"]),
        (0.02, (), []),
    ],
)
async def test_hand_overs_that_cost_a_tenth_are_advised_against(tmp_path, elapsed_s, settings, keys):
    async with scripted(tmp_path, "cluster.share=true", "cluster.lease.cache=release", *settings) as script:
        for step in range(1, 6):
            at, id = 4.0 * step, f"g{step}.0"
            script.issue(at, id)
            script.finish(at + 1, id)
            script.score(at + 1.5, id)
            script.at(at + 2, Leased(holder="learner", step=step, elapsed_s=elapsed_s, tokens=0))
            script.step(at + 3, step, id)
            script.at(at + 3.5, Leased(holder="replicas", step=step, elapsed_s=elapsed_s, tokens=0))
    write_rows(tmp_path / "metrics.jsonl", [make_step_row(step, 4.0 * step) for step in range(1, 6)])
    output = CliRunner().invoke(app, [str(tmp_path)], catch_exceptions=False).output
    assert [word for word in output.split() if word.startswith("cluster.lease")] == keys


@pytest.mark.parametrize("schedule", [Schedule.ASYNC, Schedule.ONE_STEP])
def test_where_generation_is_95_percent_of_34_s_twice_the_learner_leaves_34_s(schedule):
    step = mean_step_of(schedule, measured_s=34.0, generation_s=0.95 * 34.0, learner_s=1.7)
    assert what_if(step, StepStage.LEARNER) == pytest.approx(34.0)
    assert what_if(step, StepStage.GENERATION) < 18.0


def test_under_sync_the_same_saves_what_the_learner_took():
    step = mean_step_of(Schedule.SYNC, measured_s=34.0, generation_s=0.95 * 34.0, learner_s=1.7)
    assert what_if(step, StepStage.LEARNER) == pytest.approx(34.0 - 0.85)


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
    found = remedies(Bottleneck.REWARD, load_config(CONFIG, ["reward.workers=1", *settings]), step)
    assert [one.change for one in found if one.key == "reward.workers"] == changes
    assert found


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
    found = remedies(Bottleneck.REWARD, load_config(CONFIG, ["reward.workers=1", *settings]), step)
    assert next((one.change for one in found if one.key == "reward.workers"), None) == change


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
    step = replace(mean_step_of(**BOTTLENECKS[Bottleneck.ENVIRONMENT]), away=away)
    found = advised(step, *overrides).remedies
    assert [one.key for one in found][:2] == keys
    assert found[-1].key == "environment"


def test_where_no_core_is_idle_no_more_processes_of_environments_are_advised():
    step = replace(mean_step_of(**BOTTLENECKS[Bottleneck.ENVIRONMENT]), away=7.0, use=replace(FULL, own_cpu=0.5))
    assert "environment.workers" not in [one.key for one in advised(step).remedies]


def test_more_in_flight_shortens_environments_where_they_are_the_wall_and_generation_elsewhere():
    step, more = mean_step_of(**BOTTLENECKS[Bottleneck.ENVIRONMENT]), Remedy("rollout.max_batch", "64 -> 128", "")
    assert what_if_set(step, Bottleneck.ENVIRONMENT, more) == pytest.approx(10.0 - 7.8 / 2)
    assert what_if_set(step, Bottleneck.GENERATION, more) == pytest.approx(10.0 - 2.0 / 2)


def test_what_replay_and_trajectory_balance_refuse_is_not_advised():
    balance = ("algorithm={name: tba}", "rollout.without_signal=train")
    step = replace(mean_step_of(learner_s=9.8), reference_in_learner=True, reference_s=5.0)
    assert "algorithm.reference_pass" in [one.key for one in advised(step, *balance).remedies]
    found = advised(step, *balance, "buffer.replay.share=0.5").remedies
    assert "algorithm.reference_pass" not in [one.key for one in found]
    config = load_config(CONFIG, [*balance])
    late = [one.key for one in remedies(Bottleneck.FRESHNESS, config, step)]
    assert late
    assert "algorithm.correction" not in late


def test_a_reference_pass_inside_the_learner_is_moved_out_of_it():
    inside = replace(mean_step_of(learner_s=9.8), reference_in_learner=True, reference_s=5.0)
    found = advised(inside, "algorithm.kl_coef=0.01")
    assert found.remedies[0].key == "algorithm.reference_pass"


@pytest.mark.parametrize(
    ("bottleneck", "overrides", "key"),
    [
        (Bottleneck.REWARD, (), "reward.workers"),
        (Bottleneck.LEARNER, ("learner.recompute=all",), "learner.recompute"),
        (Bottleneck.LEARNER, (), "learner.world_size"),
        (Bottleneck.WEIGHTS, ("relay.fanout=2",), "relay.fanout"),
        (Bottleneck.LONG_TAIL, (), "rollout.on_new_weights"),
        (Bottleneck.FRESHNESS, (), "staleness.max_staleness"),
        (Bottleneck.REWARD, ("schedule=sync",), "schedule"),
    ],
)
def test_the_first_remedy_is_a_key_of_the_config(bottleneck, overrides, key):
    assert advised(mean_step_of(**BOTTLENECKS[bottleneck]), *overrides).remedies[0].key == key


def test_against_a_long_tail_drafts_are_advised_where_they_change_no_token():
    step = mean_step_of(**BOTTLENECKS[Bottleneck.LONG_TAIL])
    drafts = Remedy("rollout.engine.speculation", "none -> ngram", "")
    assert (drafts.key, drafts.change) in [(one.key, one.change) for one in advised(step).remedies]
    assert what_if_set(step, Bottleneck.LONG_TAIL, drafts) == pytest.approx(10.0 - 7.0 / 2)
    for other in ("rollout.engine.speculation=ngram", "rollout.engine={kind: sglang}"):
        assert drafts.key not in [one.key for one in advised(step, other).remedies]


def test_on_full_cores_more_replicas_promise_at_most_a_tenth_and_the_cores_are_the_bottleneck():
    idle = mean_step_of(generation_s=9.9)
    assert 10.0 / what_if(idle, StepStage.GENERATION) > 1.5
    full = on_full_cores(generation_s=9.9)
    for stage in StepStage:
        assert 10.0 / what_if(full, stage) <= 1.1
    assert what_if(full, StepStage.GENERATION) == pytest.approx(9.8)
    assert ("rollout.replicas", "2 -> 4") not in [(one.key, one.change) for one in advised(full).remedies]


def test_on_full_cores_what_saves_work_is_advised_before_more_machines():
    few = replace(on_full_cores(generation_s=9.9), crowded_share=0.9)
    assert [one.key for one in advised(few).remedies] == ["rollout.max_batch", *LAST]
    short = replace(on_full_cores(learner_s=9.9), microbatches=90.0)  # of 0.1 s each
    assert [one.key for one in advised(short).remedies] == ["packer.max_tokens", *LAST]
    long = replace(on_full_cores(learner_s=9.9), microbatches=9.0)
    assert "packer.max_tokens" not in [one.key for one in advised(long).remedies]


def test_on_one_machine_without_gpus_a_cluster_is_no_setting_to_change_first():
    full = on_full_cores(generation_s=9.9)
    config = load_config(CONFIG, [])
    advice = advise_changes(diagnose(full, config), config)
    assert (advice.gains, advice.without) == (
        (),
        "no setting of this run on this machine removes what limits it; more cores or a GPU would, or a Ray"
        " cluster (cluster.address)",
    )
    on_gpus = load_config(CONFIG, ["cluster.learner_device=cuda"])
    assert [one.key for one, _ in advise_changes(diagnose(full, on_gpus), on_gpus).gains] == ["cluster.address"]


def test_data_that_is_mostly_too_old_is_a_wall_and_a_narrower_bound_its_remedy():
    step = replace(mean_step_of(generation_s=9.9, learner_s=9.9), age=Age(lost=0.38, kl={"3-4": 0.03}))
    found = advised(step, "staleness.max_staleness=6")
    assert found.bottleneck is Bottleneck.STALE_DATA
    assert (found.remedies[0].key, found.remedies[0].change) == ("staleness.max_staleness", "6 -> 3")
    assert advised(step, "staleness.max_staleness=null").remedies[0].change == "none -> 4"


@pytest.mark.parametrize("bottleneck", [Bottleneck.FRESHNESS, Bottleneck.LONG_TAIL, Bottleneck.WEIGHTS])
@pytest.mark.parametrize("bound", [0, 1, 3, 5, 7, 8, 40])
def test_no_bound_above_eight_is_advised(bottleneck, bound):
    found = advised(mean_step_of(**BOTTLENECKS[bottleneck]), f"staleness.max_staleness={bound}")
    assert found.bottleneck is bottleneck
    bounds = [one.change for one in found.remedies if one.key == "staleness.max_staleness"]
    assert len(bounds) == (bound < 8)
    assert all(bound < int(change.split(" -> ")[1]) <= 8 for change in bounds)
    assert found.remedies


@pytest.mark.parametrize("bottleneck", [Bottleneck.FRESHNESS, Bottleneck.WEIGHTS])
def test_where_much_of_the_weight_is_gone_no_wider_bound_is_advised_nor_rarer_versions(bottleneck):
    step = replace(mean_step_of(**BOTTLENECKS[bottleneck]), age=Age(lost=0.3, kl={}))
    found = advised(step)
    assert found.bottleneck is bottleneck
    assert not {"staleness.max_staleness", "learner.publish_every"} & {one.key for one in found.remedies}


def test_slow_weights_have_a_remedy_left_where_settings_have_none():
    step = replace(mean_step_of(**BOTTLENECKS[Bottleneck.WEIGHTS]), age=Age(lost=0.3, kl={}))
    found = advised(step, "learner.lora.rank=16", "relay.fanout=1")
    assert [one.key for one in found.remedies] == ["relay.host"]


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
    step = mean_step_of(Schedule(schedule), **BOTTLENECKS[Bottleneck.WEIGHTS])
    found = advised(step, f"learner.publish_every={every}", f"staleness.max_staleness={bound}")
    assert found.bottleneck is Bottleneck.WEIGHTS
    assert [one.why for one in found.remedies if one.key == "learner.publish_every"] == ([why] if why else [])


@pytest.mark.parametrize(("bound", "changes"), [(40, ["12 -> 9", "40 -> 8"]), (None, ["12 -> 5", "none -> 4"])])
def test_a_narrower_bound_that_rare_versions_forbid_comes_with_more_frequent_ones(bound, changes):
    step = replace(mean_step_of(generation_s=9.9, learner_s=9.9), age=Age(lost=0.6, kl={}))
    settings = ("learner.publish_every=12", f"staleness.max_staleness={'null' if bound is None else bound}")
    found = advised(step, *settings)
    assert found.bottleneck is Bottleneck.STALE_DATA
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
    first = advised(mean_step_of(**BOTTLENECKS[Bottleneck.LONG_TAIL]), *settings).remedies[0]
    assert first.change == "drain -> resume"
    assert "repacking" not in first.why if words is None else words in first.why


@pytest.mark.parametrize(
    ("bottleneck", "remedy", "step_s"),
    [
        (Bottleneck.REWARD, Remedy("reward.workers", "2 -> 5", ""), 10.0 - 9.8 + 9.8 * 2 / 5),
        (Bottleneck.LONG_TAIL, Remedy("rollout.on_new_weights", "drain -> resume", ""), 10.0 - 7.0),
        (Bottleneck.FRESHNESS, Remedy("staleness.max_staleness", "0 -> 2", ""), 4.0),
    ],
)
def test_a_remedy_is_predicted_at_the_very_value_that_it_sets(bottleneck, remedy, step_s):
    assert what_if_set(mean_step_of(**BOTTLENECKS[bottleneck]), bottleneck, remedy) == pytest.approx(step_s)


@pytest.mark.parametrize("bottleneck", BOTTLENECKS)
def test_on_full_cores_the_first_remedy_of_every_bottleneck_promises_at_most_a_tenth(bottleneck):
    step = on_full_cores(**BOTTLENECKS[bottleneck])
    config = load_config(CONFIG, [WITH_ENVIRONMENT, "algorithm.kl_coef=0.01"])
    first = remedies(bottleneck, config, step)[0]
    assert 1.0 <= step.measured_s / what_if_set(step, bottleneck, first) <= 1.1


def test_fewer_replicas_on_full_cores_cost_no_time():
    step = on_full_cores(generation_s=9.9)
    fewer = next(one for one in advised(step, "rollout.replicas=2").remedies if one.key == "rollout.replicas")
    assert fewer.change == "2 -> 1"
    assert what_if_set(step, Bottleneck.CPU, fewer) == step.measured_s


def test_every_remedy_names_a_setting_that_exists():
    steps = [mean_step_of(**times) for times in BOTTLENECKS.values()]
    steps += [on_full_cores(generation_s=9.9), replace(steps[0], age=Age(lost=0.6, kl={}))]
    for step in steps:
        found = advised(step, "learner.recompute=all")
        for remedy in found.remedies:
            section = type(load_config(CONFIG, []))
            for name in remedy.key.split("."):
                assert name in section.model_fields, remedy.key
                section = section.model_fields[name].annotation
                section = next(
                    (kind for kind in getattr(section, "__args__", ()) if kind is not type(None)), section
                )


def test_a_step_is_predicted_with_more_of_a_stage_and_under_other_schedules():
    step = mean_step_of(learner_s=9.8, generation_s=2.0)
    assert what_if(step, StepStage.GENERATION) == pytest.approx(10.0)
    assert what_if(step, StepStage.LEARNER) == pytest.approx(5.1)
    step_s, longest = steps_under(step)[Schedule.SYNC]
    assert (step_s, longest) == (pytest.approx(11.8), StepStage.LEARNER)


def test_a_limit_on_scoring_is_advised_only_where_it_is_shorter():
    found = advised(mean_step_of(**BOTTLENECKS[Bottleneck.REWARD]), "reward.timeout_s=0.3")
    assert "reward.timeout_s" not in [remedy.key for remedy in found.remedies]
    found = advised(mean_step_of(**BOTTLENECKS[Bottleneck.REWARD]), "reward.timeout_s=5")
    assert "reward.timeout_s" in [remedy.key for remedy in found.remedies]
