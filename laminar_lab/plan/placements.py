"""Placements of a run on a fleet: every one that its GPUs' memory holds. Pure.

Called by `plan.planner`. A placement says which GPUs train, which generate, and how much each takes on at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_lab.plan.times import kv_tokens
from laminar_py.config import ConfigError
from laminar_py.config.learner import Recompute
from laminar_py.config.rollout import Schedule
from laminar_py.runtime.preflight import SPARE_SHARE, Parts, learner_memory

STATIC_SHARE = 0.85  # of an engine's GPU, for weights and KV cache
MOST_RUNNING = 256  # sequences of an engine, for which CUDA graphs are usual
RESERVE_SHARE = 0.95  # of a KV cache that running sequences fill on average before some are retracted
LEARNER_SIZES = 16  # numbers of learner GPUs that are tried
DEPTHS = (1, 2, 4)  # shares of a step that a draining replica admits under one version


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlacement:
    """Use of a fleet, e.g. 8 of 24 H100s train a 7B and 16 generate:

    `FleetPlacement(schedule=Schedule.ASYNC, learner_gpus=8, tensor_parallel=1, replicas=16, max_batch=128,
    batch_per_replica=256, kv_tokens=920_000, pack_tokens=18432, recompute=Recompute.ALL)`.
    """

    schedule: Schedule
    learner_gpus: int  # FSDP ranks
    tensor_parallel: int  # GPUs of a replica
    replicas: int
    max_batch: int  # sequences that a replica decodes at a time
    batch_per_replica: int  # that it admits under one version
    kv_tokens: int  # of a replica
    pack_tokens: int  # of a microbatch
    recompute: Recompute

    @property
    def rollout_gpus(self) -> int:
        """GPUs that generate."""
        return self.replicas * self.tensor_parallel


def placements(request: PlanRequest) -> list[FleetPlacement]:
    """Every placement that fits. Where none does a `ConfigError` says what is missing."""
    degrees = tensor_parallel_degrees(request)
    least = _least_learner(request)
    every = (
        placement
        for size in _learner_sizes(least, request.fleet)
        for degree in degrees
        for placement in _under_all_schedules(request, size, degree)
    )
    found = list(dict.fromkeys(every))  # sizes that leave the same replicas are one
    if not found:
        needs, has = least + min(degrees), request.fleet.gpus
        raise ConfigError(
            f"gpus={has}: {request.model} needs {needs} {request.fleet.gpu.name}, {least} to train and"
            f" {min(degrees)} to generate; give more, or GPUs with more memory"
        )
    return found


def tensor_parallel_degrees(request: PlanRequest) -> list[int]:
    """Numbers of GPUs of a replica that hold the model and its longest trajectory. Raises `ConfigError`."""
    fleet, shape, lengths, measured = request.fleet, request.shape, request.lengths, request.measured
    within = [degree for degree in shape.divisions if degree <= fleet.per_node and fleet.per_node % degree == 0]
    if measured is not None and measured.engine.gpus not in within:
        raise ConfigError(
            f"--profile: is of replicas of {measured.engine.gpus} GPUs, and on nodes of {fleet.per_node}"
            f" {request.model} can have {', '.join(map(str, within))}; measure one of those"
        )
    if measured is not None:
        within = [measured.engine.gpus]
    fitting = [degree for degree in within if _cache(request, degree) >= lengths.most]
    if not fitting:
        most = within[-1]
        room = max(0, _cache(request, most))
        raise ConfigError(
            f"gpu={fleet.gpu.name}: {most} of a node leave {request.model} room for {room:,} tokens of KV cache"
            f" and the longest trajectory has {lengths.most:,}; take GPUs with more memory, or lower cap"
        )
    return fitting


def learner_bytes(request: PlanRequest, placement: FleetPlacement) -> Parts:
    """Bytes of one of the learner's GPUs at its peak, by part."""
    return _learner_bytes(request, placement.learner_gpus, placement.recompute)


def _learner_bytes(request: PlanRequest, ranks: int, recompute: Recompute) -> Parts:
    learner = request.learner.model_copy(update={"world_size": ranks, "recompute": recompute})
    parts = learner_memory(request.shape, learner, tokens=request.lengths.most)
    return parts | {"CUDA, NCCL, fragmentation": SPARE_SHARE * request.fleet.gpu.memory_bytes}


def _least_recompute(request: PlanRequest, ranks: int) -> Recompute | None:
    """The least that so many ranks compute again to fit their memory; None where they do not fit it."""
    room = request.fleet.gpu.memory_bytes
    fits = (one for one in Recompute if sum(_learner_bytes(request, ranks, one).values()) <= room)
    return next(fits, None)


def _cache(request: PlanRequest, degree: int) -> int:
    return kv_tokens(request.shape, request.fleet.gpu, tensor_parallel=degree, static_share=STATIC_SHARE)


def _least_learner(request: PlanRequest) -> int:
    """Fewest GPUs that hold the learner. Raises `ConfigError`."""
    fleet = request.fleet
    for ranks in range(1, fleet.gpus + 1):
        if _least_recompute(request, ranks) is not None:
            return ranks
    needs = sum(_learner_bytes(request, fleet.gpus, Recompute.ALL).values())
    raise ConfigError(
        f"gpus={fleet.gpus}: to train {request.model} on trajectories of {request.lengths.most:,} tokens takes"
        f" {needs / 1e9:.1f} GB of each {fleet.gpu.name}, which has {fleet.gpu.memory_bytes / 1e9:.1f}, with all"
        " of them in the learner; give more GPUs, or lower cap"
    )


def _learner_sizes(least: int, fleet: GpuFleet) -> list[int]:
    """Numbers of learner GPUs from the fewest on, evenly."""
    every = max(1, (fleet.gpus - least) // LEARNER_SIZES)
    return list(range(least, fleet.gpus, every))


def _under_all_schedules(request: PlanRequest, learner_gpus: int, degree: int) -> Iterator[FleetPlacement]:
    replicas = _replicas(request.fleet, learner_gpus, degree)
    if not replicas:
        return
    learner_gpus = request.fleet.gpus - replicas * degree  # what no replica takes trains, too
    recompute = _least_recompute(request, learner_gpus)
    assert recompute is not None, "fewer GPUs hold it already"
    cache, lengths = _cache(request, degree), request.lengths
    running = max(most_running(cache, lengths), request.group_size)  # a group goes to one replica
    share = request.trajectories_per_step / replicas  # of a step
    for schedule in Schedule:
        depths = DEPTHS if schedule is Schedule.ASYNC else (2,)  # of which a batch takes one, however it is spread
        for admitted in sorted({max(math.ceil(depth * share), request.group_size) for depth in depths}):
            yield FleetPlacement(
                schedule=schedule,
                learner_gpus=learner_gpus,
                tensor_parallel=degree,
                replicas=replicas,
                max_batch=running,
                batch_per_replica=admitted,
                kv_tokens=cache,
                pack_tokens=lengths.most,
                recompute=recompute,
            )


def most_running(cache: int, lengths: Lengths) -> int:
    """Sequences whose mean contexts fill a KV cache, a multiple of 8 where that leaves any."""
    number = min(MOST_RUNNING, int(RESERVE_SHARE * cache / lengths.mean_context))
    return number // 8 * 8 or max(1, number)


def _replicas(fleet: GpuFleet, learner_gpus: int, degree: int) -> int:
    """Replicas, each within a node, beside a learner that takes whole nodes first."""
    full, rest = divmod(learner_gpus, fleet.per_node)
    free = [fleet.per_node] * (fleet.nodes - full)
    if rest:
        free[0] -= rest
    return sum(gpus // degree for gpus in free)
