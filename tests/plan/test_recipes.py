"""The recipes of GPU fleets, simulated: no setting limits them that one could change on the same GPUs."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from laminar_lab.advice import WORTH, advise_changes
from laminar_lab.emulation.settings import read_profile
from laminar_lab.gpus import gpu_named
from laminar_lab.plan.judge import judge
from laminar_lab.plan.planner import make_plan
from laminar_lab.plan.pretend import ignored, placement_of, pretend, request_of
from laminar_lab.report.diagnosis import describe_diagnosis
from laminar_lab.report.run_report import read_report
from laminar_lab.simulate.record import new_simulated_run
from laminar_lab.simulate.run import simulate
from laminar_py.cli import app
from laminar_py.config import ConfigError
from laminar_py.config.loading import load_config
from tests.experiments.test_recipes import SMALL_GPU
from tests.runs.runs import REPO

MORE_GPUS = ("rollout.replicas", "rollout.engine.learner_devices")
RECIPES = sorted(path for path in REPO.glob("experiments/*/*gpu.yaml"))
ON_SEVERAL = [path for path in RECIPES if path.parent.name != "one_gpu"]


LENGTHS = {"32b_128k_64gpu": {"p50": 12_000, "p99": 90_000}}  # tokens of the longest recipe's responses


def gpu_of(path):
    return gpu_named("RTX4090" if path.stem in SMALL_GPU else "H100")


def pretended(path, *overrides, p50=None):
    config = load_config(path, overrides)
    return pretend(config, gpu_of(path), **LENGTHS.get(path.stem, {"p50": p50}))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ON_SEVERAL, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_nothing_is_advised_to_a_recipe_on_its_own_gpus(tmp_path, recipe, monkeypatch):
    monkeypatch.chdir(REPO)
    config, profile = pretended(recipe, "steps=24", f"runs={tmp_path}")
    run = new_simulated_run(config)
    simulate(config, run=run, profile=profile)
    report = read_report(run.path)
    advice = advise_changes(report.diagnosis, report.snapshot.config)
    gains = {one.key: gain for one, gain in advice.gains if one.key not in MORE_GPUS}
    assert {key: gain for key, gain in gains.items() if gain >= WORTH} == {}
    lines = dict(describe_diagnosis(report.diagnosis))
    # shared replicas wait for the learner's turns, not for the bound
    assert config.cluster.share or "is neither too tight nor too loose" in lines["staleness"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_is_within_ten_percent_of_the_plan_for_its_gpus(recipe, monkeypatch):
    monkeypatch.chdir(REPO)
    config = load_config(recipe, [])
    request = request_of(config, gpu_of(recipe), **LENGTHS.get(recipe.stem, {}))
    best = make_plan(request).best
    assert judge(request, placement_of(config)).tokens_per_s >= 0.9 * best.tokens_per_s, best.placement


def test_adapters_train_faster_and_travel_as_their_own_bytes(monkeypatch):
    monkeypatch.chdir(REPO)
    recipe = REPO / "experiments/math_long_cot/7b_8gpu.yaml"
    config, profile = pretended(recipe, "learner.lora={rank: 32}")
    _, whole_profile = pretended(recipe)
    assert profile.learner.train_tokens_per_s == pytest.approx(1.5 * whole_profile.learner.train_tokens_per_s)
    assert profile.learner.optimizer_s < 0.02 * whole_profile.learner.optimizer_s
    assert config.rollout.engine.learner_devices == 4


def test_a_kl_term_and_several_updates_take_time_and_the_rest_is_named(monkeypatch):
    monkeypatch.chdir(REPO)
    path = REPO / "experiments/math_long_cot/7b_8gpu.yaml"
    rates = {}
    for kl in ("0", "0.1"):
        _, profile = pretended(path, f"algorithm.kl_coef={kl}", "learner.world_size=4", "learner.offload=true")
        rates[kl] = profile.learner.train_tokens_per_s
    assert rates["0"] / rates["0.1"] == pytest.approx(8 / 6)
    assert ignored(load_config(path, ["learner.recompute=none"])) == ""
    line = ignored(load_config(path, ["learner.recompute=all"]))
    assert line == "not in the times: learner.recompute=all (its work is part of the assumed MFU of 0.4)"


def test_stages_of_frozen_models_are_left_out_and_named(monkeypatch):
    monkeypatch.chdir(REPO)
    path = REPO / "experiments/math_long_cot/7b_8gpu.yaml"
    taught = ["algorithm.name=distill", "algorithm.teacher=t", "rollout.without_signal=train"]
    settings = [*taught, "algorithm.kl_coef=0.1", "algorithm.reference_pass=stage", "learner.world_size=4"]
    plain = pretended(path, "learner.world_size=4")[1].learner
    assert pretended(path, *settings)[1].learner == plain
    line = ignored(load_config(path, settings))
    assert "algorithm.reference_pass=stage (its GPU is assumed to keep up)" in line
    assert line.endswith("algorithm.teacher (it is assumed to keep up)")


@pytest.mark.parametrize("advantage", ["group_mean", "batch_std", "gae", "none"])
def test_a_teacher_beside_rewards_leaves_their_advantage_and_all_groups(monkeypatch, advantage):
    monkeypatch.chdir(REPO)
    taught = [f"algorithm={{teacher: t, teacher_coef: 0.5, advantage: {advantage}}}", "learner.world_size=4"]
    config, _ = pretended(REPO / "experiments/math_long_cot/7b_8gpu.yaml", *taught, "learner.offload=true")
    assert config.algorithm.advantage == ("group_std" if advantage == "none" else advantage)
    assert config.rollout.without_signal == "train"


def test_a_critic_takes_a_pass_and_a_second_models_training_beside_other_passes(monkeypatch):
    monkeypatch.chdir(REPO)
    path = REPO / "experiments/math_long_cot/7b_8gpu.yaml"
    sized = ("learner.world_size=4", "learner.offload=true")
    plain = pretended(path, *sized)[1].learner
    ppo = pretended(path, *sized, "algorithm={name: ppo, kl_coef: 0.1, updates_per_step: 2}")[1].learner
    assert plain.train_tokens_per_s / ppo.train_tokens_per_s == pytest.approx((6 + 8 + 2) / 6)
    assert ppo.optimizer_s == 4 * plain.optimizer_s


def test_an_environment_whose_times_nobody_knows_is_refused(monkeypatch):
    monkeypatch.chdir(REPO)
    with pytest.raises(ConfigError, match=r"environment: a simulation does not know its times; leave it out"):
        pretended(REPO / "experiments/tool_calculator/tool_calculator.yaml")


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("rollout.engine.tensor_parallel=3", "3 GPUs cannot divide the heads of Qwen2.5-7B; choose of"),
        ("model.path=Llama-3.1-405B", "GB"),
    ],
)
def test_what_no_such_gpu_can_hold_is_refused(setting, line, monkeypatch):
    monkeypatch.chdir(REPO)
    with pytest.raises(ConfigError, match=line):
        pretended(REPO / "experiments/math_long_cot/7b_8gpu.yaml", setting)


def test_a_measured_profile_takes_the_place_of_the_data_sheet(monkeypatch):
    monkeypatch.chdir(REPO)
    recipe, gpu = REPO / "experiments/math_long_cot/7b_8gpu.yaml", gpu_named("H100")
    measured = read_profile(Path("configs/emulation/h100_7b_tp2.yaml"))
    _, times = pretend(load_config(recipe, []), gpu, measured=measured)
    assert times == measured
    with pytest.raises(ConfigError, match=r"--profile: it measured replicas of 1 GPUs, but rollout\.engine has 2"):
        pretend(load_config(recipe, []), gpu, measured=read_profile(Path("configs/emulation/h100_7b_tp1.yaml")))


def test_a_profile_without_a_gpu_is_refused():
    done = CliRunner().invoke(app, ["simulate", "configs/emulation/repack.yaml", "--profile", "profile.yaml"])
    assert str(done.exception).startswith("--profile=profile.yaml: give --gpu, too")
