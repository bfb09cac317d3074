"""Ranking: what fits, what is refused, that the simulator judges, and what is written of it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from typer.testing import CliRunner

from laminar_lab.doctor.checks import fit_pretended, pretended_cluster
from laminar_lab.doctor.gpu_formula import has_margin
from laminar_lab.doctor.memory import memory_faults
from laminar_lab.emulation.settings import emulation_of, read_profile
from laminar_lab.gpus import gpu_named
from laminar_lab.plan.inputs import lengths_by_task, read_subject
from laminar_lab.plan.judge import Judges, judge, shrunk_fleet
from laminar_lab.plan.output import describe_plan
from laminar_lab.plan.placements import gpu_bytes, placements
from laminar_lab.plan.planner import MOST, TIED, make_plan, plan_by_formula
from laminar_lab.plan.pretend import request_of
from laminar_lab.plan.request import Lengths
from laminar_lab.plan.stages import estimate, traffic_slowdown
from laminar_lab.plan.writing import BEGINNING, write_config
from laminar_lab.step_time import learner_step_s, learner_times
from laminar_py.cli.command import app
from laminar_py.config.learner import LearnerConfig, LoraConfig
from laminar_py.config.loading import load_config, read_tree
from laminar_py.config.rollout import Schedule
from laminar_py.config.section import ConfigError
from laminar_py.learner.packing.balance import fit_bins
from tests.builders import make_finished
from tests.plan.builders import LENGTHS, make_request
from tests.runs.runs import REPO

SMALL = {"prompts_per_step": 8, "group_size": 8}


def plan_of(**others):
    return make_plan(make_request(nodes=1, **SMALL, **others))


@pytest.fixture(scope="module")
def small():
    return plan_of()


def test_formulas_alone_rank_all_placements_where_no_time_is_left_for_simulations():
    request = make_request(nodes=1, **SMALL)
    with Judges(request, within_s=0) as judges:
        plan = make_plan(request, judge_all=judges)
    assert plan.best.judgement is None
    assert plan.best.tokens_per_s == max(estimate(request, one).tokens_per_s for one in placements(request))
    assert list(describe_plan(plan))[-1] == f"{plan.considered} placements fit; these are ranked by formula alone"


def test_a_plan_says_what_the_published_speed_of_fp8_would_change(small):
    (line,) = [one for one in describe_plan(small) if "quantization=fp8" in one]
    ((faster, now),) = re.findall(r"([\d,]+) tokens/s in place of ([\d,]+)", line)
    assert 1.0 <= float(faster.replace(",", "")) / float(now.replace(",", "")) <= 1.41
    assert "not measured" in line


def test_where_the_time_ends_after_a_round_the_simulated_placements_are_ranked():
    request, rounds = make_request(nodes=1, **SMALL), []
    some_judgement = judge(request, placements(request)[0])

    def judge_all(some, seed, times=1):
        rounds.append(some)
        done = len(some) if len(rounds) == 1 else 1
        return [some_judgement] * done + [None] * (len(some) - done)

    plan = make_plan(request, judge_all=judge_all)
    assert len(rounds) == 2
    assert {one.placement for one in plan.ranked} <= {*rounds[0], rounds[1][0]}
    assert all(one.judgement is some_judgement for one in plan.ranked)


def test_the_command_ranks_by_formula_at_once_with_a_legend():
    done = CliRunner().invoke(app, ["plan", "7B", "--gpus", "8x8xH100", "--seconds", "0"], catch_exceptions=False)
    assert done.output.startswith("a step: 128 prompts of 400 tokens x 16 samples, staleness 4\n")
    assert "learner MFU 0.4 (--mfu); response tokens p50 1,500, p99 15,000, cap 16,384\n" in done.output
    for words in ("Placements, by formula:", "admits: responses that", "ranked by formula alone"):
        assert words in done.output
    assert max(map(len, done.output.partition("first:")[0].splitlines())) <= 80


def test_the_ranking_is_printed_once_where_no_simulation_ends():
    call = ["plan", "7B", "--gpus", "1x8xH100", "--seconds", "0.01"]
    done = CliRunner().invoke(app, call, catch_exceptions=False)
    assert "within 0.01 s to rank by them, so the formulas are the answer here; --seconds 60 gives" in done.output
    assert done.output.count("Placements, by formula:") == 1


def test_all_placements_use_the_fleet_and_fit_its_memory():
    request = make_request()
    for one in placements(request):
        generating = (one.replicas - one.shared) * one.tensor_parallel
        assert one.learner_gpus + generating == request.fleet.gpus
        assert all(has_margin(parts, request.fleet.gpu.memory_bytes) for parts in gpu_bytes(request, one))
        assert one.kv_tokens >= request.lengths.most


@pytest.mark.parametrize(
    ("nodes", "size", "lora"), [(1, "7B", False), (1, "32B", True), (8, "7B", False), (8, "32B", False)]
)
def test_doctor_has_no_warning_for_the_first_choice_of_a_plan(nodes, size, lora, tmp_path):
    """All weights of a 32B do not fit a learner on eight GPUs; adapters do."""
    learner = LearnerConfig(lora=LoraConfig() if lora else None)
    plan = plan_by_formula(make_request(size=size, nodes=nodes, learner=learner))
    tree = {"name": "p", **BEGINNING, "learner": {"lora": {} if lora else None}}
    folder, path = Path("models") / plan.request.model, tmp_path / "p.yaml"
    write_config(plan, plan.best, path, model=folder, base=tree)
    fit = fit_pretended(load_config(path, []), pretended_cluster([f"{nodes}x8xH100"]))
    assert (fit.faults, fit.warnings, fit.unplaced) == ([], [], None)
    assert [column.parts for column in fit.memory][:2] == [
        plan.learner_memory(plan.best),
        plan.engine_memory(plan.best),
    ]
    assert all(column.asked <= column.fitting and has_margin(column.parts, 80e9) for column in fit.memory)


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        ({"size": "72B", "nodes": 1}, "gpus=8: a learner of Qwen2.5-72B on all of them needs"),
        ({"size": "405B"}, "gpu=H100: 8 of a node leave Llama-3.1-405B room for 0 tokens of KV cache"),
        (
            {"size": "7B", "nodes": 1, "per_node": 2},
            "gpus=2: Qwen2.5-7B needs 3 H100, 2 to train and 1 to generate",
        ),
    ],
)
def test_a_model_that_fits_no_placement_is_told_what_is_missing(wanted, line):
    with pytest.raises(ConfigError) as error:
        placements(make_request(**wanted))
    assert str(error.value).startswith(line)


@pytest.mark.slow
def test_the_first_choice_has_most_tokens_of_all_that_were_simulated():
    request, seen = make_request(nodes=1, **SMALL), {}

    def judge_all(some, seed, times=1):
        found = [judge(request, one, seed=seed, times=times) for one in some]
        if times > 1:
            return found
        for one, judged in zip(some, found, strict=True):
            seen.setdefault(one, []).append(judged.tokens_per_s)
        return found

    plan = make_plan(request, judge_all=judge_all)
    assert plan.best.tokens_per_s == max(mean(speeds) for speeds in seen.values())
    assert {one.placement.schedule for one in plan.ranked} == set(Schedule)
    assert len(seen) <= MOST
    best = max(speeds[0] for speeds in seen.values())
    assert all(speeds[0] >= (1 - TIED) * best for speeds in seen.values() if len(speeds) > 1)


@pytest.mark.slow
def test_a_schedule_whose_formula_is_too_low_is_found_where_simulations_say_so():
    request = make_request(nodes=1, **SMALL)
    every = {one: estimate(request, one).tokens_per_s for one in placements(request)}
    figures = judge(request, next(iter(every)))
    hidden = max(
        (one for one in every if one.schedule is Schedule.ONE_STEP and one.tensor_parallel == 2), key=every.get
    )

    def judge_all(some, seed, times=1):
        times = [5.0 if one.schedule is Schedule.ONE_STEP else 1.0 for one in some]
        return [
            replace(figures, tokens_per_s=every[one] * factor * (1.5 if one == hidden else 1.0))
            for one, factor in zip(some, times, strict=True)
        ]

    assert make_plan(request, judge_all=judge_all).best.placement == hidden


@pytest.mark.slow
def test_a_depth_of_admission_whose_formula_is_too_low_is_found_where_simulations_say_so():
    request = make_request(nodes=1, max_staleness=1, prompts_per_step=32, group_size=8)
    every = {one: estimate(request, one).tokens_per_s for one in placements(request)}
    figures = judge(request, next(iter(every)))

    def factor(one):
        shares = one.batch_per_replica * one.replicas / request.trajectories_per_step
        return 1.5 if one.schedule is Schedule.ASYNC and shares > 1.5 else 0.7

    def judge_all(some, seed, times=1):
        return [replace(figures, tokens_per_s=every[one] * factor(one)) for one in some]

    best = make_plan(request, judge_all=judge_all).best
    assert best.tokens_per_s == max(every[one] * factor(one) for one in every)


@pytest.mark.parametrize(("nodes", "prompts"), [(1, 4), (8, 16), (16, 90), (32, 16)])
def test_no_more_are_simulated_than_is_said_however_small_a_replicas_share_of_a_step_is(nodes, prompts):
    request = make_request(nodes=nodes, prompts_per_step=prompts)
    figures, seen = judge(make_request(nodes=1, **SMALL), placements(make_request(nodes=1, **SMALL))[0]), set()

    def judge_all(some, seed, times=1):
        seen.update(some)
        every = [estimate(request, one).tokens_per_s for one in some]
        return [replace(figures, tokens_per_s=rate, replicas=10**6) for rate in every]

    make_plan(request, judge_all=judge_all)
    assert len(seen) <= MOST


@pytest.mark.slow
def test_a_plan_depends_on_its_request_alone(small):
    assert [one.placement for one in plan_of().ranked] == [one.placement for one in small.ranked]


@pytest.mark.slow
def test_mean_staleness_of_every_placement_is_within_its_bound(small):
    assert all(one.judgement.figures.staleness_mean <= 4 for one in small.ranked)


@pytest.mark.parametrize("schedule", Schedule)
def test_replicas_generate_no_replayed_groups_and_the_learner_trains_on_all(schedule):
    whole, half = make_request(), make_request(replay_share=0.5)
    assert (half.trajectories_per_step, half.new_per_step) == (512, 256)
    assert half.learner_size(16_784) == whole.learner_size(16_784)
    one = next(one for one in placements(half) if one.schedule is schedule and not one.shared)
    found, usual = (estimate(request, one).times for request in (half, whole))
    assert found.generation_s < usual.generation_s
    assert found.learner_s == pytest.approx(usual.learner_s, rel=0.1), "weights travel more often beside it"
    config, _ = shrunk_fleet(half, one, replicas=4, seed=0)
    assert config.fresh_groups == -(-config.rollout.prompts_per_step // 2)
    few = make_request(replay_share=0.05)  # one group of 32
    assert few.new_per_step == 31 * 16
    assert not shrunk_fleet(few, one, replicas=1, seed=0)[0].buffer.replay.share


def test_a_shrunk_fleet_keeps_the_learners_speed_for_each_replica():
    request = make_request(nodes=8)
    one = placements(request)[0]
    config, profile = shrunk_fleet(request, one, replicas=4, seed=0)
    rate = profile.learner.train_tokens_per_s
    shrunk = rate * emulation_of(config).learner_devices / config.trajectories_per_step
    whole = (
        learner_times(request.shape, request.fleet.gpu).train_tokens_per_s
        * one.learner_gpus
        / request.trajectories_per_step
    )
    assert shrunk * traffic_slowdown(request, one) == pytest.approx(whole)


def test_a_simulation_agrees_with_the_formula_where_the_learner_binds():
    request = make_request()
    few = min(placements(request), key=lambda one: (one.learner_gpus, one.schedule is not Schedule.ASYNC))
    assert judge(request, few).tokens_per_s == pytest.approx(estimate(request, few).tokens_per_s, rel=0.1)


def test_a_simulation_agrees_with_the_formula_where_a_batch_ahead_hides_half_the_way_of_the_weights():
    lengths = Lengths(median=400, sigma=0.5, cap=16_384, prompt=1000)
    request = make_request(
        size="32B", gpu="H200", lengths=lengths, prompts_per_step=80, group_size=8, max_staleness=1, shares=False
    )
    (wide,) = (
        one for one in placements(request) if one.schedule is Schedule.ONE_STEP and one.tensor_parallel == 8
    )
    found = estimate(request, wide)
    assert found.tokens_per_s == pytest.approx(judge(request, wide).tokens_per_s, rel=0.1)
    assert 0 < found.times.weights_s < request.publish_s
    sync = replace(wide, schedule=Schedule.SYNC)
    assert estimate(request, sync).times.weights_s > request.publish_s


def test_a_learner_on_whole_nodes_is_sharded_within_a_node_where_it_fits():
    found = placements(make_request(nodes=4, **SMALL))
    split = [one for one in found if not one.shared]
    assert {one.shard_ranks for one in split if one.learner_gpus in (16, 24)} == {8}
    assert {one.shard_ranks for one in split if one.learner_gpus not in (16, 24)} == {None}
    large = placements(make_request(size="72B", nodes=8, **SMALL))
    assert any(one.learner_gpus % 8 == 0 for one in large)
    assert {one.shard_ranks for one in large} == {None}, "eight GPUs do not hold 72B"


def test_the_simulated_learner_is_as_slow_as_its_collectives():
    request = make_request(nodes=4, **SMALL)
    placement = next(one for one in placements(request) if one.learner_gpus == 16)
    slow = replace(request, fleet=replace(request.fleet, network_bytes_per_s=1e8))
    whole = replace(placement, shard_ranks=None)
    rates = [
        shrunk_fleet(asked, place, replicas=100, seed=0)[1].learner.train_tokens_per_s
        for asked, place in ((request, placement), (request, whole), (slow, placement), (slow, whole))
    ]
    assert rates[0] == pytest.approx(rates[1]), "computation hides both"
    assert rates[0] > rates[2] > rates[3]
    assert estimate(slow, placement).times.learner_s < estimate(slow, whole).times.learner_s


@pytest.mark.slow
def test_the_written_config_is_one_that_doctor_finds_room_for(small, tmp_path):
    path = tmp_path / "run.yaml"
    write_config(small, small.best, path, model=tmp_path)
    shape = {name: getattr(small.request.shape, name) for name in small.request.shape.__struct_fields__}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"torch_dtype": "bfloat16"}))
    config = load_config(path, [])
    assert config.gpus == 8
    assert config.cluster.share == bool(small.best.placement.shared)
    assert not memory_faults(config, gpu_bytes=80e9)
    with pytest.raises(ConfigError, match="exists already; name another file"):
        write_config(small, small.best, path, model=tmp_path)


@pytest.mark.slow
def test_a_config_that_was_given_keeps_its_data_and_reward(small, tmp_path):
    recipe = REPO / "experiments/math_long_cot/7b_8gpu.yaml"
    base, given = read_tree(recipe, []), load_config(recipe, [])
    write_config(small, small.best, tmp_path / "run.yaml", model=tmp_path, base=base)
    written = load_config(tmp_path / "run.yaml", [])
    assert (written.data, written.reward, written.algorithm) == (given.data, given.reward, given.algorithm)
    assert written.learner.world_size == small.best.placement.learner_gpus


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["7B"], "--gpus: missing; name the fleet, e.g. --gpus 1x8xH100"),
        (["7B", "--gpus", "8xH100"], "--gpus=8xH100: not nodes x GPUs x kind"),
        (["7B", "--gpus", "1x8xV100"], "--gpus=1x8xV100: no such GPU is known; choose A100"),
        (["7B", "--gpus", "1x64xcpu"], "--gpus=1x64xcpu: names no GPU"),
        (["7B", "--gpus", "1x8xH100", "--p50", "20000"], "p50=20000: lies beyond cap=16384"),
        (["7B", "--gpus", "1x8xH100", "--run", "runs/none"], "ledger=runs/none/ledger.sqlite: no such file"),
        (["nothing", "--gpus", "1x8xH100"], "model=nothing: no folder, and no model that is known"),
        (["7B", "--gpus", "1x8xH100", "--profile", "none.yaml"], "--profile=none.yaml: no such file"),
        (
            ["7B", "--gpus", "1x8xH100", "--profile", "configs/emulation/h100_32b_tp4.yaml"],
            "--profile: it measured a model of 64 layers and width 5120, but Qwen2.5-7B has 28 layers",
        ),
        (
            ["7B", "--gpus", "1x1xH100", "--profile", "configs/emulation/h100_7b_tp2.yaml"],
            "--profile: it measured replicas of 2 GPUs, but Qwen2.5-7B on nodes of 1 GPUs needs 1",
        ),
        (
            ["7B", "--gpus", "1x8xH100", "--profile", "configs/emulation/h100_7b_tp1.yaml", "--mfu", "0.3"],
            "--mfu=0.3: --profile also has the speed of the learner",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, line):
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(line)


def test_measured_times_take_the_place_of_the_rules():
    profile = read_profile(Path("configs/emulation/h100_7b_tp2.yaml"))
    slow = profile.model_copy(
        update={"engine": profile.engine.model_copy(update={"step_s": 3 * profile.engine.step_s})}
    )
    wanted = make_request(measured=slow)
    places = placements(wanted)
    assert {one.tensor_parallel for one in places} == {profile.engine.gpus}
    assert wanted.profile(places[0].tensor_parallel) == slow
    fast = make_request(measured=profile)
    assert estimate(wanted, places[0]).times.generation_s > 2 * estimate(fast, places[0]).times.generation_s


def test_a_folder_without_a_ledger_tells_no_lengths(tmp_path):
    with pytest.raises(ConfigError, match="ledger="):
        lengths_by_task(tmp_path)


@pytest.mark.slow
def test_the_command_prints_one_json_object_and_writes_the_config(tmp_path):
    small = ["--prompts-per-step", "8", "--group-size", "8", "--price", "2"]
    files = ["--write", str(tmp_path / "run.yaml")]
    result = CliRunner().invoke(app, ["plan", "7B", "--gpus", "1x8xH100", *small, *files, "--json"])
    told = json.loads(result.stdout)
    best = told["rows"][0]
    assert best["tokens_per_s"] == max(row["tokens_per_s"] for row in told["rows"])
    assert best["cost"] == pytest.approx(1000 * best["step_s"] / 3600 * 8 * 2)
    assert sum(best["engine_memory"].values()) <= 80e9
    assert load_config(tmp_path / "run.yaml", []).learner.world_size == best["learner_gpus"]


def test_a_config_names_its_model_before_it_is_downloaded_and_a_bound_where_it_is_async():
    recipe = REPO / "experiments/math_long_cot/7b_8gpu.yaml"
    subject, config = read_subject(str(recipe)), load_config(recipe, [])
    assert subject.name == "Qwen2.5-7B"
    assert subject.max_staleness == config.staleness.max_staleness
    assert subject.prompts_per_step == config.rollout.prompts_per_step


def test_a_measured_rate_of_the_relay_takes_the_place_of_the_constant():
    profile = read_profile(Path("configs/emulation/h100_7b_tp1.yaml"))
    slow = profile.model_copy(update={"relay_bytes_per_s": 0.1e9})
    request = make_request(measured=slow)
    assert request.publish_s == pytest.approx(request.version_bytes / 0.1e9)
    assert make_request(measured=profile).publish_s == make_request().publish_s
    assert request.emulated_engine(learner_devices=1)["simulation"]["publish_s"] == request.publish_s


@pytest.mark.parametrize(("prompt", "pack_tokens"), [(400, 18_432), (2000, 18_432), (2000, 65_536)])
def test_a_step_has_as_many_tokens_as_the_packer_puts_into_its_rows(prompt, pack_tokens):
    request = make_request(lengths=replace(LENGTHS, prompt=prompt))
    lengths = np.random.default_rng(1).choice(request.lengths.quantiles, (32, 16)).astype(int)
    lengths = (lengths * (request.lengths.mean / lengths.mean())).astype(int).clip(1, LENGTHS.cap)
    step = [
        make_finished(f"g{group}.{place}", prompt=prompt, response=int(length))
        for group, responses in enumerate(lengths)
        for place, length in enumerate(responses)
    ]
    for shares in (True, False):
        bins = fit_bins(step, max_tokens=pack_tokens, shares=shares)
        size = replace(request, shares=shares).learner_size(pack_tokens)
        assert size.tokens == pytest.approx(sum(packed.num_tokens for packed in bins), rel=0.02)
        assert size.squares == pytest.approx(sum(packed.squares for packed in bins), rel=0.1)


def test_a_shared_prompt_makes_the_step_of_a_learner_shorter_and_a_run_that_records_experts_has_none():
    request = make_request(lengths=replace(LENGTHS, prompt=4000, median=200))
    (placement, *_) = placements(request)
    times = [estimate(replace(request, shares=shares), placement).times.learner_s for shares in (True, False)]
    assert times[0] < 0.5 * times[1]
    recorded = load_config(Path("experiments/mixture_30b_a3b/32gpu.yaml"), [])
    assert not request_of(recorded, gpu_named("H100")).shares


def test_a_publish_stops_the_learner_for_its_bytes():
    request = make_request()
    whole, adapters = request.profile(1).learner, make_request(learner=LearnerConfig(lora=LoraConfig())).profile(1)
    assert whole.publish_s == pytest.approx(request.version_bytes / 20e9)
    assert adapters.learner.publish_s < whole.publish_s / 50
    assert learner_step_s(whole, tokens=0, cost=1.0, microbatches=1, ranks=1) == pytest.approx(
        whole.optimizer_s + whole.publish_s
    )
