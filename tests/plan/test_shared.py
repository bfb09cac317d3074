"""Placements with shared GPUs: what fits beside what, which is better by formula, and the fleet to simulate."""

import pytest

from laminar_lab.gpus import gpu_named
from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_lab.plan.shared import (
    best_shared,
    best_split,
    shared_fleet,
    shared_is_better,
    shared_placements,
    shared_step_s,
    split_step_s,
)
from laminar_py.config.cluster import LeaseCache
from laminar_py.config.learner import LearnerConfig, LoraConfig
from laminar_py.config.section import ConfigError


def ask(gpus, *, size="7B", adapter=True, prompts=32):
    name, shape = model_named(size)
    return PlanRequest(
        model=name,
        shape=shape,
        fleet=GpuFleet(gpu=gpu_named("H100"), nodes=1, per_node=gpus),
        lengths=Lengths.of_percentiles(1500, 15_000, cap=16_384, prompt=400),
        prompts_per_step=prompts,
        group_size=8,
        learner=LearnerConfig(lora=LoraConfig() if adapter else None),
    )


def test_one_gpu_trains_a_7b_by_adapter_only_if_it_is_shared():
    assert best_split(ask(1)) is None
    assert shared_is_better(ask(1))


def test_what_does_not_fit_at_all_is_an_error():
    assert best_shared(ask(1, adapter=False)) is None
    with pytest.raises(ConfigError, match=r"needs .* GB of each"):
        shared_is_better(ask(1, adapter=False))


def test_a_cache_that_stays_has_less_room_than_a_released_one():
    found = {
        (one.fleet.learner_gpus, one.fleet.tensor_parallel, one.cache): one for one in shared_placements(ask(2))
    }
    kept = [key for key in found if key[2] is LeaseCache.KEEP]
    assert kept
    for learner_gpus, degree, _ in kept:
        other = found[learner_gpus, degree, LeaseCache.RELEASE].fleet.kv_tokens
        assert found[learner_gpus, degree, LeaseCache.KEEP].fleet.kv_tokens < other


def test_the_rule_compares_the_shortest_steps():
    request = ask(8, adapter=False, prompts=128)
    shared, split = best_shared(request), best_split(request)
    assert shared_step_s(request, shared) == min(shared_step_s(request, one) for one in shared_placements(request))
    assert shared_is_better(request) == (shared_step_s(request, shared) < split_step_s(request, split))


def test_a_replica_on_a_gpu_of_its_own_stays_one_in_the_simulated_fleet():
    request = ask(8, adapter=False, prompts=128)
    for one in shared_placements(request):
        config, _ = shared_fleet(request, one, replicas=one.fleet.replicas, seed=0)
        assert config.shared_replicas == one.shared_replicas <= config.rollout.replicas
        assert config.lease_cache is one.cache
