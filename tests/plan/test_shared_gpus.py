"""Placements whose learner and replicas share GPUs: which there are, their formulas, and the written config."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laminar_lab.doctor.checks import fit_pretended, pretended_cluster
from laminar_lab.doctor.gpu_formula import has_margin
from laminar_lab.plan.judge import judge, shrunk_fleet
from laminar_lab.plan.placements import gpu_bytes, placements
from laminar_lab.plan.planner import make_plan, plan_by_formula
from laminar_lab.plan.pretend import placement_of
from laminar_lab.plan.stages import estimate
from laminar_lab.plan.writing import BEGINNING, write_config
from laminar_py.cli.command import app
from laminar_py.config.learner import LearnerConfig, LoraConfig
from laminar_py.config.loading import load_config
from laminar_py.config.rollout import OnNewWeights, Schedule
from tests.plan.builders import make_request

ADAPTER = LearnerConfig(lora=LoraConfig(rank=32))


def one_gpu(**others):
    return make_request(nodes=1, per_node=1, learner=ADAPTER, prompts_per_step=16, **others)


def shared_of(request, schedule=Schedule.ASYNC):
    return [one for one in placements(request) if one.shared and one.schedule is schedule]


def test_on_one_gpu_all_placements_are_shared():
    found = placements(one_gpu())
    assert {(one.learner_gpus, one.replicas, one.shared) for one in found} == {(1, 1, 1)}
    assert {one.schedule for one in found} == {Schedule.ASYNC, Schedule.SYNC}


def test_on_several_gpus_all_replicas_share_or_some_only_generate_or_nothing_is_shared():
    found = placements(make_request(nodes=1))
    assert all(has_margin(parts, 80e9) for one in found for parts in gpu_bytes(make_request(nodes=1), one))
    uses = {(one.learner_gpus, one.replicas, one.shared) for one in found if one.tensor_parallel == 1}
    assert {(8, 8, 8), (6, 8, 6), (4, 4, 0)} <= uses


@pytest.mark.parametrize(("nodes", "per_node", "learner"), [(1, 1, ADAPTER), (1, 4, LearnerConfig())])
def test_the_config_of_a_shared_placement_is_accepted_by_the_doctor(nodes, per_node, learner, tmp_path):
    request = make_request(nodes=nodes, per_node=per_node, learner=learner)
    plan = plan_by_formula(request)
    for index, ranked in enumerate(one for one in plan.ranked if one.placement.shared):
        path = tmp_path / f"{index}.yaml"
        base = {"name": "p", **BEGINNING, "learner": {"lora": {"rank": 32} if learner.lora else None}}
        write_config(plan, ranked, path, model=Path("models/Qwen2.5-7B"), base=base)
        config = load_config(path, [])
        assert placement_of(config) == replace(ranked.placement, pack_tokens=config.row_tokens)
        found = fit_pretended(config, pretended_cluster([f"{nodes}x{per_node}xH100"]))
        assert (found.faults, found.warnings, found.unplaced) == ([], [], None)
        parts = [plan.learner_memory(ranked), plan.engine_memory(ranked)]
        assert [column.parts for column in found.memory][:2] == parts


def test_the_command_writes_a_config_for_one_gpu_that_the_doctor_accepts(tmp_path):
    path = tmp_path / "small.yaml"
    call = ["plan", "Qwen3-0.6B", "--gpus", "1x1xRTX4090", "--cap", "4096", "--seconds", "0", "--write", str(path)]
    planned = CliRunner().invoke(app, call, catch_exceptions=False)
    assert "async 1+1x1 s1" in planned.output
    assert load_config(path, []).cluster.share
    checked = CliRunner().invoke(app, ["doctor", str(path), "--pretend", "1x1xRTX4090"], catch_exceptions=False)
    assert checked.exit_code == 0
    assert "replicas' turn" in checked.output


def test_a_step_on_shared_gpus_is_generation_then_the_learner_then_hand_overs():
    found = estimate(one_gpu(max_staleness=None), shared_of(one_gpu())[0])
    times = found.times
    assert found.step_s == pytest.approx(times.generation_s + times.learner_s + times.weights_s, rel=0.02)


def test_half_of_the_replicas_wait_for_the_learner_where_half_are_shared():
    request = make_request(nodes=1, max_staleness=None)
    whole, half = (
        next(one for one in shared_of(request) if one.learner_gpus == ranks and one.tensor_parallel == 1)
        for ranks in (8, 4)
    )
    assert (estimate(request, whole).waiting_share, estimate(request, half).waiting_share) == (1.0, 0.5)


def test_groups_on_shared_gpus_also_stand_still_in_each_turn_of_the_learner():
    request = make_request(nodes=1)
    shared = next(one for one in shared_of(request) if one.shared == one.replicas)
    own, found = (estimate(request, one) for one in (replace(shared, shared=0), shared))
    assert found.freshness_s == pytest.approx(own.freshness_s + found.times.learner_s)


def test_several_steps_share_a_turn_that_costs_more_than_the_policy_allows():
    (one,) = shared_of(one_gpu())
    fresh, stale = (estimate(one_gpu(max_staleness=bound), one).times.weights_s for bound in (2, 5))
    assert stale <= fresh
    small = replace(one_gpu(max_staleness=5), prompts_per_step=1)
    assert estimate(small, one).times.weights_s < estimate(replace(small, max_staleness=2), one).times.weights_s


def test_responses_go_through_new_weights_and_requests_with_adapters_start_again():
    policies = {}
    for learner in (LearnerConfig(), ADAPTER):
        request = make_request(nodes=1, per_node=4, learner=learner)
        found = {
            shrunk_fleet(request, one, replicas=4, seed=0)[0].rollout.on_new_weights for one in shared_of(request)
        }
        policies[learner.lora is None] = found
    assert policies[True] <= {OnNewWeights.RETRACT, OnNewWeights.IN_PLACE}
    assert policies[False] == {OnNewWeights.RESUME}


def test_a_shrunk_fleet_shares_as_many_of_its_gpus():
    request = make_request(nodes=4, prompts_per_step=128)
    for one in shared_of(request):
        if one.learner_gpus in (16, 32) and one.tensor_parallel <= 2:
            config, _ = shrunk_fleet(request, one, replicas=8, seed=0)
            assert config.shared_replicas / config.rollout.replicas == one.shared / one.replicas


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Schedule.ASYNC, Schedule.SYNC])
def test_a_simulation_agrees_with_the_formula_on_one_gpu(schedule):
    (one,) = shared_of(one_gpu(), schedule)
    assert estimate(one_gpu(), one).tokens_per_s == pytest.approx(judge(one_gpu(), one).tokens_per_s, rel=0.1)


@pytest.mark.parametrize("shares", [True, False])
def test_the_written_config_shares_gpus_where_that_is_simulated_as_faster(shares, tmp_path):
    request = make_request(nodes=1, prompts_per_step=8, group_size=8)
    some = judge(request, placements(request)[0])

    def judge_all(found, seed, times=1):
        return [replace(some, tokens_per_s=2.0 if bool(one.shared) is shares else 1.0) for one in found]

    plan = make_plan(request, judge_all=judge_all)
    assert {bool(one.placement.shared) for one in plan.ranked} == {True, False}
    for name, settings in (("new", {}), ("again", {"cluster": {"share": not shares}})):
        base = {"name": name, **BEGINNING, **settings}
        write_config(plan, plan.best, tmp_path / f"{name}.yaml", model=tmp_path, base=base)
        assert load_config(tmp_path / f"{name}.yaml", []).cluster.share is shares
