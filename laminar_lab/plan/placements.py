"""Every placement of a run on a fleet that fits the memory of its GPUs. Pure.

The planner ranks the placements. A placement says how many GPUs train, how many generate, and their batch sizes.
On shared GPUs learner and replicas take turns (`cluster.share`); replicas on other GPUs never stop.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from laminar_lab.doctor.gpu_formula import (
    MARGIN,
    Parts,
    cache_tokens,
    critic_parts,
    engine_memory,
    has_margin,
    learner_memory,
    shared_cache_tokens,
    turn_parts,
    with_spare,
)
from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_lab.step_time import RankTraffic, rank_traffic
from laminar_py.config import ConfigError
from laminar_py.config.learner import LearnerConfig, Recompute
from laminar_py.config.rollout import OnNewWeights, Schedule

STATIC_SHARE = 0.85  # of an engine's GPU memory, for weights and KV cache
MOST_RUNNING = 256  # sequences of an engine, the usual limit of CUDA graphs
MOST_CACHED = 4_000_000  # tokens; no engine keeps an index of more
RESERVE_SHARE = 0.95  # of a KV cache; with more in use an engine retracts sequences
LEARNER_SIZES = 16  # numbers of learner GPUs to try
DEPTHS = (1, 2, 4)  # a draining replica admits so many times its share of a step under one version
SHARED_DEPTH = 2  # the same of a replica on shared GPUs, whose responses go through new versions


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlacement:
    """A use of a fleet, e.g. 8 of 24 H100s train a 7B and 16 generate:

    `FleetPlacement(schedule=Schedule.ASYNC, learner_gpus=8, tensor_parallel=1, replicas=16, max_batch=128,
    batch_per_replica=256, kv_tokens=920_000, pack_tokens=18432, recompute=Recompute.ALL)`.
    """

    schedule: Schedule
    learner_gpus: int  # FSDP ranks
    tensor_parallel: int  # GPUs of a replica
    replicas: int
    max_batch: int  # sequences that a replica decodes at the same time
    batch_per_replica: int  # trajectories that a replica admits under one version
    kv_tokens: int  # of a replica
    pack_tokens: int  # of a microbatch, over the ranks that share it
    recompute: Recompute
    shard_ranks: int | None = None  # that share a copy of the weights; None: all
    context_parallel: int = 1  # ranks that share a microbatch
    shared: int = 0  # replicas, of all, that take turns with the learner on its GPUs
    keeps_cache: bool = False  # these keep their KV cache in the learner's turn

    def of_learner(self, learner: LearnerConfig) -> LearnerConfig:
        """Return a learner's settings with the sizes of this placement."""
        changes = {
            "world_size": self.learner_gpus,
            "recompute": self.recompute,
            "shard_ranks": self.shard_ranks,
            "context_parallel": self.context_parallel,
        }
        return learner.model_copy(update=changes)


def placements(request: PlanRequest) -> list[FleetPlacement]:
    """Return every placement that fits. Raises `ConfigError` if none fits."""
    degrees = tensor_parallel_degrees(request)
    least = _least_learner(request)
    split = (
        placement
        for size in _learner_sizes(least, request.fleet)
        for degree in degrees
        for placement in _under_all_schedules(request, size, degree)
    )
    shared = (
        placement
        for size in [*_learner_sizes(least, request.fleet), request.fleet.gpus]
        for degree in degrees
        for placement in _on_shared_gpus(request, size, degree)
    )
    found = list(dict.fromkeys([*split, *shared]))  # several learner sizes can leave the same number of replicas
    if not found:
        needs, has = least + min(degrees), request.fleet.gpus
        raise ConfigError(
            f"gpus={has}: {request.model} needs {needs} {request.fleet.gpu.name}, {least} to train and"
            f" {min(degrees)} to generate, or more memory to share one; give more, or train by adapter"
            " (learner.lora)"
        )
    return found


def tensor_parallel_degrees(request: PlanRequest) -> list[int]:
    """Return the replica sizes that hold the model and the longest trajectory. Raises `ConfigError`."""
    fleet, shape, lengths, measured = request.fleet, request.shape, request.lengths, request.measured
    within = [degree for degree in shape.divisions if degree <= fleet.per_node and fleet.per_node % degree == 0]
    if measured is not None and measured.engine.gpus not in within:
        raise ConfigError(
            f"--profile: it measured replicas of {measured.engine.gpus} GPUs, but {request.model} on nodes of"
            f" {fleet.per_node} GPUs needs {', '.join(map(str, within))}; measure such replicas"
        )
    if measured is not None:
        within = [measured.engine.gpus]
    fitting = [degree for degree in within if _kv_tokens(request, degree) >= lengths.most]
    if not fitting:
        most = within[-1]
        room = _kv_tokens(request, most)
        raise ConfigError(
            f"gpu={fleet.gpu.name}: {most} of a node leave {request.model} room for {room:,} tokens of KV cache"
            f" and the longest trajectory has {lengths.most:,}; take GPUs with more memory, or lower cap"
        )
    return fitting


def on_new_weights(placement: FleetPlacement, learner: LearnerConfig) -> OnNewWeights:
    """Return how replicas get new weights: on shared GPUs without draining, since the learner's turn stops them.

    SGLang keeps a running request on its adapter, so such a request starts again.
    """
    if not placement.shared or placement.schedule is not Schedule.ASYNC:
        return OnNewWeights.DRAIN
    if learner.lora is not None:
        return OnNewWeights.RESUME
    return OnNewWeights.IN_PLACE if placement.keeps_cache else OnNewWeights.RETRACT


def lease_settings(placement: FleetPlacement) -> dict[str, object]:
    """Return settings of `cluster`: whether GPUs are shared, and then what the turns do with KV caches."""
    if not placement.shared:
        return {"share": False}
    return {"share": True, "lease": {"cache": "keep" if placement.keeps_cache else "release"}}


def gpu_bytes(request: PlanRequest, placement: FleetPlacement) -> tuple[Parts, Parts]:
    """Return the peak bytes by part of a learner's GPU and a replica's; of a shared GPU in the turns of both."""
    learner, size = _learner_bytes(request, placement.of_learner(request.learner)), request.fleet.gpu.memory_bytes

    def engine(within: float) -> Parts:
        return engine_memory(
            request.shape,
            gpus=placement.tensor_parallel,
            kv_tokens=placement.kv_tokens,
            static_bytes=STATIC_SHARE * within,
            gpu_bytes=within,
        )

    if not placement.shared:
        return learner, engine(size)
    return turn_parts(learner, engine, gpu_bytes=size, keeps_cache=placement.keeps_cache)


def learner_traffic(request: PlanRequest, placement: FleetPlacement) -> RankTraffic:
    """Return the seconds that a rank's collectives take."""
    fleet, measured = request.fleet, request.measured
    network = None if measured is None else measured.network_bytes_per_s
    return rank_traffic(
        request.shape,
        fleet.gpu,
        placement.of_learner(request.learner),
        tokens=placement.pack_tokens / placement.context_parallel,
        per_node=fleet.per_node,
        network_bytes_per_s=min(fleet.network_bytes_per_s, network or math.inf),
        link_bytes_per_s=None if measured is None else measured.link_bytes_per_s,
    )


def _learner_bytes(request: PlanRequest, learner: LearnerConfig) -> Parts:
    tokens = math.ceil(request.lengths.most / learner.context_parallel)
    critic = critic_parts(request.shape, learner) if request.has_critic else {}
    parts = learner_memory(request.shape, learner, tokens=tokens) | critic
    return with_spare(parts, request.fleet.gpu.memory_bytes)


def _fits(request: PlanRequest, learner: LearnerConfig) -> bool:
    return has_margin(_learner_bytes(request, learner), request.fleet.gpu.memory_bytes)


def _shard_ranks(request: PlanRequest, learner: LearnerConfig) -> int | None:
    """Return a node's GPUs if a learner on several whole nodes fits in groups of a node; else None.

    Groups keep gathers on NVLink. Their copies of the weights add gradients over the network once an update.
    """
    size, ranks = request.fleet.per_node, learner.world_size
    if ranks <= size or ranks % size:
        return None
    return size if _fits(request, learner.model_copy(update={"shard_ranks": size})) else None


def _fitting_learner(request: PlanRequest, ranks: int) -> LearnerConfig | None:
    """Return the settings with which the learner fits so many ranks; None if it does not fit.

    Few ranks share a microbatch, all of one node, and then recomputation is least. Inputs of layers go to the host
    where nothing else fits.
    """
    keys, per_node = request.shape.num_key_heads, request.fleet.per_node
    sizes = [s for s in range(1, min(keys, per_node) + 1) if not (keys % s or per_node % s or ranks % s)]
    *on_gpus, offloaded = Recompute
    for kinds in (on_gpus, [offloaded]):
        for size, recompute in itertools.product(sizes, kinds):
            changes = {"world_size": ranks, "shard_ranks": None, "context_parallel": size, "recompute": recompute}
            learner = request.learner.model_copy(update=changes)
            if _fits(request, learner):
                return learner
    return None


def _kv_tokens(request: PlanRequest, degree: int) -> int:
    static_bytes = (STATIC_SHARE - MARGIN) * request.fleet.gpu.memory_bytes
    return min(cache_tokens(request.shape, gpus=degree, static_bytes=static_bytes), MOST_CACHED)


def _least_learner(request: PlanRequest) -> int:
    """Return the fewest GPUs that hold the learner. Raises `ConfigError` if the fleet is too small."""
    fleet = request.fleet
    for ranks in range(1, fleet.gpus + 1):
        if _fitting_learner(request, ranks) is not None:
            return ranks
    changes = {"world_size": fleet.gpus, "shard_ranks": None, "recompute": Recompute.ALL_OFFLOADED}
    needs = sum(_learner_bytes(request, request.learner.model_copy(update=changes)).values())
    raise ConfigError(
        f"gpus={fleet.gpus}: a learner of {request.model} on all of them needs {needs / 1e9:.1f} GB of each"
        f" {fleet.gpu.name} ({fleet.gpu.memory_bytes / 1e9:.1f} GB) for trajectories of {request.lengths.most:,}"
        " tokens; give more GPUs, or lower cap"
    )


def _learner_sizes(least: int, fleet: GpuFleet) -> list[int]:
    """Return evenly spaced numbers of learner GPUs, from the fewest on."""
    every = max(1, (fleet.gpus - least) // LEARNER_SIZES)
    return list(range(least, fleet.gpus, every))


def _under_all_schedules(request: PlanRequest, learner_gpus: int, degree: int) -> Iterator[FleetPlacement]:
    """Yield the placements of one learner size and tensor parallelism, under every schedule and depth.

    Yields none where no replica is left. GPUs that no replica can use join the learner.
    """
    replicas = _replicas(request.fleet, learner_gpus, degree)
    if not replicas:
        return
    learner_gpus = request.fleet.gpus - replicas * degree  # GPUs without a replica train, too
    learner = _fitting_learner(request, learner_gpus)
    if learner is None:  # its GPUs cannot be divided among ranks that share a microbatch
        return
    cache, lengths = _kv_tokens(request, degree), request.lengths
    running = max(most_running(cache, lengths), request.group_size)  # one replica generates a whole group
    share = request.new_per_step / replicas  # of a step
    for schedule in Schedule:
        depths = (
            DEPTHS if schedule is Schedule.ASYNC else (2,)
        )  # no depth helps where a batch is a share of a step
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
                recompute=learner.recompute,
                shard_ranks=_shard_ranks(request, learner),
                context_parallel=learner.context_parallel,
            )


def _on_shared_gpus(request: PlanRequest, learner_gpus: int, degree: int) -> Iterator[FleetPlacement]:
    """Yield the placements of a learner on so many GPUs, with replicas on all GPUs.

    Under `async` replicas keep the KV cache in the learner's turn, or compute it again. Nothing is worth keeping
    under `sync`, and where a new adapter makes requests start again.
    """
    if learner_gpus % degree or request.fleet.gpus % degree:
        return
    replicas, lengths = request.fleet.gpus // degree, request.lengths
    kept = [] if request.learner.lora is not None else [(Schedule.ASYNC, True)]
    for schedule, keeps in ((Schedule.ASYNC, False), *kept, (Schedule.SYNC, False)):
        found = _fitting_beside_replicas(request, learner_gpus, degree, keeps_cache=keeps)
        if found is None:
            continue
        learner, cache = found
        admitted = SHARED_DEPTH * math.ceil(request.new_per_step / replicas)
        yield FleetPlacement(
            schedule=schedule,
            learner_gpus=learner_gpus,
            tensor_parallel=degree,
            replicas=replicas,
            max_batch=max(most_running(cache, lengths), request.group_size),
            batch_per_replica=max(admitted, request.group_size),
            kv_tokens=cache,
            pack_tokens=lengths.most,
            recompute=learner.recompute,
            shard_ranks=learner.shard_ranks,
            shared=learner_gpus // degree,
            keeps_cache=keeps,
        )


def _fitting_beside_replicas(
    request: PlanRequest, ranks: int, degree: int, *, keeps_cache: bool
) -> tuple[LearnerConfig, int] | None:
    """Return the settings of a learner whose GPUs replicas share, and the tokens of a replica's KV cache.

    Most sequences run at a time, then recomputation is least. None if both do not fit.
    """
    fitting, lengths = [], request.lengths
    *on_gpus, _ = Recompute
    for recompute in on_gpus:
        changes = {"world_size": ranks, "shard_ranks": None, "context_parallel": 1, "recompute": recompute}
        learner = request.learner.model_copy(update=changes)
        for shard_ranks in dict.fromkeys((_shard_ranks(request, learner), None)):
            sharded = learner.model_copy(update={"shard_ranks": shard_ranks})
            tokens = _shared_kv_tokens(request, sharded, degree, keeps_cache=keeps_cache)
            if tokens >= lengths.most:
                fitting.append((sharded, tokens))
                break
    return max(fitting, key=lambda one: most_running(one[1], lengths), default=None)


def _shared_kv_tokens(request: PlanRequest, learner: LearnerConfig, degree: int, *, keeps_cache: bool) -> int:
    """Return the tokens of KV cache of a replica on GPUs of the learner; 0 if its peak has no room beside them."""
    size, parts = request.fleet.gpu.memory_bytes, _learner_bytes(request, learner)

    def without_cache(within: float) -> Parts:
        static = STATIC_SHARE * within
        return engine_memory(request.shape, gpus=degree, kv_tokens=0, static_bytes=static, gpu_bytes=within)

    peak, _ = turn_parts(parts, without_cache, gpu_bytes=size, keeps_cache=False)
    if not has_margin(peak, size):
        return 0
    room = shared_cache_tokens(
        request.shape,
        parts,
        gpus=degree,
        static_share=STATIC_SHARE,
        gpu_bytes=size,
        keeps_cache=keeps_cache,
        margin=MARGIN,
    )
    return min(room, MOST_CACHED)


def most_running(cache: int, lengths: Lengths) -> int:
    """Return how many sequences of mean context fill a KV cache, as a multiple of 8 from 8 on."""
    number = min(MOST_RUNNING, int(RESERVE_SHARE * cache / lengths.mean_context))
    return number // 8 * 8 or max(1, number)


def _replicas(fleet: GpuFleet, learner_gpus: int, degree: int) -> int:
    """Return the number of replicas, each within a node, beside a learner that takes whole nodes first."""
    full, rest = divmod(learner_gpus, fleet.per_node)
    free = [fleet.per_node] * (fleet.nodes - full)
    if rest:
        free[0] -= rest
    return sum(gpus // degree for gpus in free)
