"""Placements whose replicas and learner share GPUs (`cluster.share`): memory, formula, and the fleet to simulate.

The learner has some GPUs of the fleet, and every GPU has a replica: replicas on the learner's GPUs take turns with
it, the others never stop. `shared_is_better` compares the best of them with the best split by formula alone.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from laminar_lab.doctor.gpu_formula import MARGIN, Parts, cache_tokens, has_margin, learner_memory, with_spare
from laminar_lab.emulation.settings import EmulationProfile, emulation_of
from laminar_lab.plan.judge import shrunk_fleet
from laminar_lab.plan.placements import (
    STATIC_SHARE,
    FleetPlacement,
    most_running,
    placements,
    tensor_parallel_degrees,
)
from laminar_lab.plan.request import PlanRequest
from laminar_lab.plan.stages import NORM, ReplicaRates, train_step_s
from laminar_lab.step_time import decode_step_s
from laminar_py.config import ConfigError, RunConfig
from laminar_py.config.cluster import ClusterConfig, LeaseCache, LeaseConfig, LeaseSwitch
from laminar_py.config.learner import LearnerConfig, Recompute
from laminar_py.config.rollout import OnNewWeights, Schedule

RESIDENT = ("masters (fp32)", "gradients (fp32)", "moments (fp32)", "CUDA, NCCL, fragmentation")
POLICIES = {LeaseCache.RELEASE: OnNewWeights.RETRACT, LeaseCache.KEEP: OnNewWeights.IN_PLACE}
UNCLEAR = 0.15  # of the formula's gain, within which simulations of 40 fleets disagreed with it
BATCHES_A_TURN = 4  # most batches that a long turn of the replicas collects, since each makes the data older


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlacement:
    """A use of a fleet with shared GPUs: every GPU has a replica, and `fleet.learner_gpus` of them also train."""

    fleet: FleetPlacement
    cache: LeaseCache
    on_new_weights: OnNewWeights

    @property
    def shared_replicas(self) -> int:
        """Replicas that take turns with the learner."""
        return min(self.fleet.replicas, self.fleet.learner_gpus // self.fleet.tensor_parallel)


def shared_placements(request: PlanRequest) -> list[SharedPlacement]:
    """Return the shared placements that fit, under `async` with responses that continue under new weights.

    Empty where learner and engine cannot share a GPU.
    """
    try:
        sizes, shapes = tensor_parallel_degrees(request), learner_shapes(request, recompute=Recompute.ALL)
    except ConfigError:
        return []
    return [
        placement
        for degree, learner, cache in itertools.product(sizes, shapes, LeaseCache)
        for placement in _placed(request, degree, learner, cache)
    ]


def _placed(
    request: PlanRequest, degree: int, learner: LearnerConfig, cache: LeaseCache
) -> Iterator[SharedPlacement]:
    """Yield the placement of a learner and replicas of `degree` GPUs, if it fits."""
    lengths, replicas = request.lengths, request.fleet.gpus // degree
    if learner.context_parallel > 1 or learner.world_size % degree or not replicas:
        return
    kv_tokens = shared_cache_tokens(request, learner, degree=degree, keeps=cache is LeaseCache.KEEP)
    if kv_tokens < lengths.most:
        return
    share = math.ceil(request.trajectories_per_step / replicas)
    fleet = FleetPlacement(
        schedule=Schedule.ASYNC,
        learner_gpus=learner.world_size,
        tensor_parallel=degree,
        replicas=replicas,
        max_batch=max(most_running(kv_tokens, lengths), request.group_size),
        batch_per_replica=max(2 * share, request.group_size),
        kv_tokens=kv_tokens,
        pack_tokens=lengths.most,
        recompute=learner.recompute,
        shard_ranks=learner.shard_ranks,
        context_parallel=1,
    )
    yield SharedPlacement(fleet=fleet, cache=cache, on_new_weights=POLICIES[cache])


def shared_cache_tokens(request: PlanRequest, learner: LearnerConfig, *, degree: int, keeps: bool) -> int:
    """Return the tokens of KV cache of a replica of `degree` GPUs beside a learner's rank; 0 if none fits.

    Between its turns a rank keeps its states. A cache that stays also needs room at the learner's peak.
    """
    gpu_bytes, shape = request.fleet.gpu.memory_bytes, request.shape
    peak = with_spare(learner_memory(shape, learner, tokens=request.lengths.most), gpu_bytes)
    left = gpu_bytes - sum(peak.get(name, 0.0) for name in RESIDENT)
    weights, rest = shape.served_bytes * shape.total / degree, (1.0 - STATIC_SHARE) * left
    beside: Parts = peak | {"engine": weights + rest}
    if left <= 0.0 or not has_margin(beside, gpu_bytes):
        return 0
    room = STATIC_SHARE * left
    if keeps:
        room = min(room, gpu_bytes - sum(peak.values()) - rest)
    return cache_tokens(shape, gpus=degree, static_bytes=room - MARGIN * gpu_bytes)


LEARNER_SIZES = 32  # most learner sizes that are compared


def learner_shapes(request: PlanRequest, *, recompute: Recompute) -> list[LearnerConfig]:
    """Return learners that fit with `recompute` and a rank a microbatch, from the fewest ranks to all GPUs."""
    gpu_bytes, most = request.fleet.gpu.memory_bytes, request.lengths.most
    every, found = max(1, request.fleet.gpus // LEARNER_SIZES), []
    for ranks in {*range(1, request.fleet.gpus, every), request.fleet.gpus}:
        changes = {"world_size": ranks, "shard_ranks": None, "context_parallel": 1, "recompute": recompute}
        learner = request.learner.model_copy(update=changes)
        if has_margin(learner_memory(request.shape, learner, tokens=most), gpu_bytes):
            found.append(learner)
    return found


# ---- formula


def shared_step_s(request: PlanRequest, placement: SharedPlacement) -> float:
    """Estimate the seconds of a step: the learner's turn, then all replicas generate the rest of its tokens.

    Replicas on GPUs of their own also generate in the learner's turn. Shared replicas stand still in it, so their
    turn must be long enough for the longest response of a group to end within the bound of staleness. A turn costs
    two hand-overs and, with a released cache, the prefill of all running responses; several steps share it where
    they fit the bound. Responses continue under new weights, so nothing drains.
    """
    fleet, profile = placement.fleet, request.profile(placement.fleet.tensor_parallel)
    speed = _speed(request, fleet, profile)
    tokens, learner_s = request.trajectories_per_step * request.lengths.mean, train_step_s(request, fleet)
    always = fleet.replicas - placement.shared_replicas
    left = max(0.0, tokens - always * speed.tokens_per_s * learner_s)
    generation_s, bound = left / (fleet.replicas * speed.tokens_per_s), request.max_staleness
    if bound is not None:
        share = learner_s / (learner_s + generation_s)
        generation_s = _norm(generation_s, speed.longest_s / (bound + 1 - share))
    switch_s, engine = profile.engine.load_s, profile.engine
    if placement.cache is LeaseCache.RELEASE:
        prefill_s = speed.running * request.lengths.mean_context / engine.prefill_tokens_per_s
        switch_s += 2 * engine.hand_over_s + prefill_s
    wanted = switch_s / LeaseConfig().most_cost / generation_s  # steps of a turn at the bounded cost
    most = BATCHES_A_TURN if bound is None else max(1, bound - 1)
    return learner_s + generation_s + switch_s / min(max(1.0, wanted), most)


def split_step_s(request: PlanRequest, fleet: FleetPlacement) -> float:
    """Estimate the seconds of a step on separate GPUs; responses keep their caches under new weights."""
    profile = request.profile(fleet.tensor_parallel)
    speed, learner_s = _speed(request, fleet, profile), train_step_s(request, fleet)
    tokens = request.trajectories_per_step * request.lengths.mean
    generation_s = tokens / (fleet.replicas * speed.tokens_per_s) + profile.engine.load_s
    if request.max_staleness is None:
        return _norm(generation_s, learner_s)
    return _norm(generation_s, learner_s, (speed.longest_s + learner_s) / (request.max_staleness + 1))


class _Speed(NamedTuple):
    """Speed of a replica whose slots never drain."""

    tokens_per_s: float
    running: float  # responses at a time
    longest_s: float  # from the start of a group to its last end


def _speed(request: PlanRequest, fleet: FleetPlacement, profile: EmulationProfile) -> _Speed:
    running = float(fleet.max_batch)
    if request.max_staleness is not None:
        live = request.trajectories_per_step * (request.max_staleness + 1) / fleet.replicas
        running = max(1.0, min(running, live))
    rates, longest = ReplicaRates(profile.engine, request.lengths), request.lengths.longest_of(request.group_size)
    token_s = decode_step_s(profile.engine, running, request.lengths.mean_context)
    return _Speed(rates.full_tokens_per_s(running), running, float(longest * token_s))


def _norm(*stages: float) -> float:
    """Return a step that is as long as its longest stage, and longer where others are nearly as long."""
    return float(sum(seconds**NORM for seconds in stages) ** (1 / NORM))


def best_shared(request: PlanRequest) -> SharedPlacement | None:
    """Return the shared placement with the shortest step by formula; None if none fits."""
    return min(shared_placements(request), key=lambda one: shared_step_s(request, one), default=None)


def best_split(request: PlanRequest) -> FleetPlacement | None:
    """Return the asynchronous split placement with the shortest step by formula; None if none fits."""
    try:
        found = [one for one in placements(request) if one.schedule is Schedule.ASYNC and not one.shared]
    except ConfigError:
        return None
    return min(found, key=lambda one: split_step_s(request, one), default=None)


def shared_gain(request: PlanRequest) -> float:
    """Return the speed of shared GPUs over the best split, by formula; infinite if no split fits, 0 if no sharing.

    Within `UNCLEAR` of 1 only a simulation of both tells which is faster. Raises `ConfigError` if nothing fits.
    """
    shared, split = best_shared(request), best_split(request)
    if shared is None:
        placements(request)
        return 0.0
    return math.inf if split is None else split_step_s(request, split) / shared_step_s(request, shared)


def shared_is_better(request: PlanRequest) -> bool:
    """Return whether shared GPUs are faster than the best split, by formula. Raises `ConfigError` if none fits."""
    return shared_gain(request) > 1.0


# ---- simulation


def continuing_fleet(
    request: PlanRequest, fleet: FleetPlacement, *, policy: OnNewWeights, replicas: int, seed: int
) -> tuple[RunConfig, EmulationProfile]:
    """Return `shrunk_fleet` with another policy for new weights."""
    config, profile = shrunk_fleet(request, fleet, replicas=replicas, seed=seed)
    rollout = config.rollout.model_copy(update={"on_new_weights": policy})
    return config.model_copy(update={"rollout": rollout}), profile


def shared_fleet(
    request: PlanRequest,
    placement: SharedPlacement,
    *,
    replicas: int,
    seed: int,
    switch: LeaseSwitch = LeaseSwitch.READY,
) -> tuple[RunConfig, EmulationProfile]:
    """Make the config and profile of a shared fleet with about `replicas` replicas, as `judge.shrunk_fleet`."""
    policy, degree = placement.on_new_weights, placement.fleet.tensor_parallel
    config, profile = continuing_fleet(request, placement.fleet, policy=policy, replicas=replicas, seed=seed)
    engine = emulation_of(config).model_copy(update={"engine_devices": degree, "start_spread_s": 0.0})
    cluster = ClusterConfig(share=True, lease=LeaseConfig(switch=switch, cache=placement.cache))
    rollout = config.rollout.model_copy(update={"engine": engine})
    return config.model_copy(update={"rollout": rollout, "cluster": cluster}), profile
