"""Memory of a run's GPUs, by use: `doctor.gpu_formula` over a config and its model's shape.

Called by `laminar doctor`, `laminar simulate --gpu` and, before processes start, `laminar train`. A config that
does not fit gets one line with the settings that would.
"""

import itertools
import subprocess
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from laminar_lab.doctor.gpu_formula import (
    MARGIN,
    Parts,
    cache_tokens,
    critic_parts,
    engine_memory,
    frozen_memory,
    has_margin,
    host_inputs,
    learner_memory,
    shared_cache_tokens,
    turn_parts,
    with_spare,
)
from laminar_lab.model_shape import ModelShape
from laminar_lab.plan.known_models import shape_at
from laminar_py.config.cluster import Device, LeaseCache
from laminar_py.config.learner import Accumulate, LearnerConfig, LoraConfig, Recompute
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.records.codec import encode
from laminar_py.records.columns import MODEL_COLUMNS, Source

GPU_BYTES = 80e9  # assumed size of a GPU
MOST_TOKENS = 1 << 24  # of a microbatch
MOST_RANKS = 1024
KINDS = ("learner", "engine")  # of GPUs that every run has
ALL_KINDS = (*KINDS, *map(str, MODEL_COLUMNS))  # and of frozen models that are stages
LEARNERS_TURN, REPLICAS_TURN = "learner's turn", "replicas' turn"  # of a learner's GPU that replicas share
COMMAND_TIMEOUT_S = 10.0  # for `nvidia-smi`
STAGE_SETTINGS = {  # setting and remedy of a frozen model that its GPU does not hold
    "reference": ("algorithm.reference_pass=stage", "set it to learner"),
    "teacher": ("algorithm.teacher", "name the address of a server"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """One kind of GPU: `GpuMemory(kind="engine", parts=parts, host=0.0, asked=850_000, fitting=920_000)`."""

    kind: str  # one of `ALL_KINDS`, or a turn on a shared GPU of the learner; the column's title
    parts: Parts
    host: float  # bytes beside it in pinned host memory, for each GPU: the inputs of a learner's layers
    asked: int | None  # tokens of a microbatch or of an engine's KV cache; None: an engine takes all that fit
    fitting: int  # the most of them that a GPU, or the GPUs of an engine, hold

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.parts.values())


def gpu_memory(
    config: RunConfig, *, gpu_bytes: float = GPU_BYTES, kinds: Collection[str] = ALL_KINDS
) -> list[GpuMemory]:
    """Return columns for learner, engine and stages, if they have GPUs; none without the shape of the model.

    With `cluster.share` the learner's GPU has a column for each turn, and the engine's is of other replicas.
    """
    shape = shape_at(config.model.path)
    if shape is None:
        return []
    columns, engine = [], config.rollout.engine
    shared = config.shared_replicas if engine.gpus else 0
    if config.learner_device is Device.CUDA and "learner" in kinds:
        make = _turn_columns if shared else _learner_columns
        columns += make(shape, config, gpu_bytes)
    if engine.gpus and not engine.hosts and "engine" in kinds and shared < config.rollout.replicas:
        parts, room = engine_parts(shape, config, gpu_bytes=gpu_bytes), _cache_room(config, shape, gpu_bytes)
        columns.append(
            GpuMemory(
                kind="engine", parts=parts, host=0.0, asked=config.rollout.kv_capacity, fitting=room(engine.gpus)
            )
        )
    stages = config.algorithm.computing_stages if config.learner_device is Device.CUDA else ()
    return columns + [
        column
        for stage in stages
        if str(stage) in kinds and (column := _stage_column(stage, config, shape, gpu_bytes)) is not None
    ]


def memory_faults(
    config: RunConfig, *, gpu_bytes: float = GPU_BYTES, kinds: Collection[str] = ALL_KINDS
) -> list[str]:
    """Return an error line for each kind of GPU that the run does not fit, with a setting that would fit."""
    faults = {"learner": _learner_fault, "engine": _engine_fault} | dict.fromkeys(STAGE_SETTINGS, _stage_fault)
    columns = gpu_memory(config, gpu_bytes=gpu_bytes, kinds=kinds)
    found = [faults[column.kind](config, column, gpu_bytes) for column in columns if column.kind in faults]
    return list(filter(None, (_turn_fault(config, columns, gpu_bytes), *found)))


def memory_warnings(config: RunConfig, *, gpu_bytes: float, kinds: Collection[str] = ALL_KINDS) -> list[str]:
    """Return a line for each kind of GPU that the run fits without a margin."""
    lower = "lower rollout.kv_capacity"
    settings = {"learner": "raise learner.world_size", "engine": lower}
    settings |= dict.fromkeys(STAGE_SETTINGS, "lower packer.max_tokens")
    settings |= {LEARNERS_TURN: "raise learner.world_size, or set cluster.share=false", REPLICAS_TURN: lower}
    return [
        f"{_gpu_of(column)} holds {column.total / 1e9:.1f} of {gpu_bytes / 1e9:.1f} GB by formula, which"
        f" leaves less than {MARGIN:.0%}; {settings[column.kind]}"
        for column in gpu_memory(config, gpu_bytes=gpu_bytes, kinds=kinds)
        if column.asked is not None and column.total <= gpu_bytes and not has_margin(column.parts, gpu_bytes)
    ]


def host_memory(*, cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes of memory that this process may use: of the host, or less within a container.

    `own` lists the cgroups of the process, of version 1 or 2. A limit of any enclosing cgroup counts.
    """
    limits = [psutil.virtual_memory().total]
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, place = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        roots, name = (cgroups, cgroups / "unified"), "memory.max"
        if controllers:
            roots, name = (cgroups / "memory", cgroups / controllers), "memory.limit_in_bytes"
        folder = Path(place.lstrip("/"))
        for root, inner in itertools.product(roots, (folder, *folder.parents)):
            limit = root / inner / name
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():  # else "max"
                limits.append(int(text))
    return min(limits)


def shard_advice(config: RunConfig, nodes: Sequence[str | None], *, gpu_bytes: float = GPU_BYTES) -> list[str]:
    """Return a line if groups of a node's ranks fit and would keep gathers on NVLink, or if a group spans nodes.

    `nodes` has each rank's node.
    """
    learner, shape, ranks_on = config.learner, shape_at(config.model.path), Counter(nodes)
    if len(ranks_on) == 1 or config.learner_device is not Device.CUDA or shape is None:
        return []
    if learner.shard_ranks is not None:
        starts = range(0, len(nodes), learner.shard_ranks)
        spans = sum(len(set(nodes[start : start + learner.shard_ranks])) > 1 for start in starts)
        ranks = ", ".join(map(str, ranks_on.values()))
        line = (
            f"learner.shard_ranks={learner.shard_ranks}: {spans} of {len(starts)} groups span nodes, which have"
            f" {ranks} ranks of the learner; choose a number that divides each"
        )
        return [line] if spans else []
    size, *others = set(ranks_on.values())
    changed = config.model_copy(update={"learner": learner.model_copy(update={"shard_ranks": size})})
    (column, *_) = gpu_memory(changed, gpu_bytes=gpu_bytes, kinds=["learner"])
    parts = column.parts
    if others or size == 1 or not has_margin(parts, gpu_bytes):
        return []
    return [
        f"learner.shard_ranks=null: each microbatch gathers weights over {len(ranks_on)} nodes; set it to {size},"
        f" a node's ranks, to gather over NVLink, with {sum(parts.values()) / 1e9:.1f} of {gpu_bytes / 1e9:.1f} GB"
        " on a GPU by formula"
    ]


def smallest_gpu() -> bytes:
    """Return the encoded bytes of this host's smallest GPU, by nvidia-smi; 0 if there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
        ).stdout
        return encode(min(int(line) for line in printed.split()) * 2**20)
    except (OSError, subprocess.SubprocessError, ValueError):
        return encode(0)


# ---- the learner


def _learner_columns(shape: ModelShape, config: RunConfig, gpu_bytes: float) -> list[GpuMemory]:
    parts = _learner_gpu(shape, config, gpu_bytes)
    return [_column_of_learner("learner", parts, shape, config, _most_packed(shape, config, gpu_bytes))]


def _column_of_learner(kind: str, parts: Parts, shape: ModelShape, config: RunConfig, fitting: int) -> GpuMemory:
    tokens = config.packer.max_tokens
    host = host_inputs(shape, config.learner.recompute, tokens=tokens)
    return GpuMemory(kind=kind, parts=parts, host=host, asked=tokens, fitting=fitting)


def _most_packed(shape: ModelShape, config: RunConfig, gpu_bytes: float, *, beside: float = 0.0) -> int:
    """Return the most tokens of a microbatch that fit a learner's GPU `beside` so many bytes of an engine."""

    def total(tokens: int) -> float:
        packer = config.packer.model_copy(update={"max_tokens": tokens})
        return beside + sum(_learner_gpu(shape, config.model_copy(update={"packer": packer}), gpu_bytes).values())

    return bisect_right(range(1, MOST_TOKENS), gpu_bytes, key=total)


def _learner_gpu(shape: ModelShape, config: RunConfig, gpu_bytes: float) -> Parts:
    return with_spare(learner_parts(shape, config, reference=_reference_shape(config, shape)), gpu_bytes)


def learner_parts(shape: ModelShape, config: RunConfig, *, reference: ModelShape | None = None) -> Parts:
    """Return the bytes of a learner's GPU at its peak, without CUDA's; `reference` is a second model."""
    learner = config.learner
    beside: Parts = {}
    if reference is not None:  # its embeddings stay gathered after its pass
        held = 0.0 if learner.offload else 4.0 * reference.total / learner.shard_size
        beside = {"reference model": held + 2.0 * reference.root}
    if config.algorithm.critic is not None:
        beside |= critic_parts(shape, learner)
    return learner_memory(shape, learner, tokens=config.packer.max_tokens) | beside


def _reference_shape(config: RunConfig, shape: ModelShape) -> ModelShape | None:
    """Return the shape of a separate reference model inside the learner, if there is one."""
    algorithm = config.algorithm
    if not algorithm.has_reference or algorithm.reference_in_own_process:
        return None
    if algorithm.reference is not None:
        return shape_at(algorithm.reference) or shape
    return None if config.learner.lora is not None else shape


def _learner_fault(config: RunConfig, column: GpuMemory, gpu_bytes: float) -> str | None:
    """Return an error line if the learner does not fit, with the cheapest settings that fit; else None."""
    if column.total <= gpu_bytes:
        return None
    learner, needs, shape = config.learner, _needs(column, gpu_bytes), shape_at(config.model.path)
    assert shape is not None, "a column has a shape"
    for change in _changes(learner):
        changed = config.model_copy(update={"learner": learner.model_copy(update=dict(change))})
        if sum(_learner_gpu(shape, changed, gpu_bytes).values()) <= gpu_bytes:
            (first, value), *others = change.items()
            further = "".join(f" and learner.{name} to {_written(value)}" for name, value in others)
            return f"learner.{first}={getattr(learner, first)}: {needs}; set it to {_written(value)}{further}"
    tokens = f"packer.max_tokens={config.packer.max_tokens}: {needs} on any number of ranks; lower it"
    for size in range(learner.context_parallel, shape.num_key_heads + 1):
        if shape.num_key_heads % size == 0:
            each = -(-config.rollout.max_len // size)
            ranks = max(-(-learner.world_size // size) * size, MOST_RANKS // 8 // size * size)
            shared: dict[str, object] = {
                "context_parallel": size,
                "world_size": ranks,
                "shard_ranks": None,
                "recompute": Recompute.ALL_OFFLOADED
                if learner.recompute is Recompute.ALL_OFFLOADED
                else Recompute.ALL,
            }
            changes = {
                "learner": learner.model_copy(update=shared),
                "packer": config.packer.model_copy(update={"max_tokens": each}),
            }
            if has_margin(_learner_gpu(shape, config.model_copy(update=changes), gpu_bytes), gpu_bytes):
                wider = f", and let ranks share a microbatch: learner.context_parallel={size}"
                return f"{tokens} to {each}{wider if size > learner.context_parallel else ''}"
    return f"{tokens}, with rollout.max_len, or train a smaller model"


def _changes(learner: LearnerConfig) -> Iterator[Mapping[str, object]]:
    """Yield changes of settings that need less memory, the cheapest first."""
    sharded: dict[str, object] = {}
    if learner.accumulate is Accumulate.WHOLE:
        sharded = {"accumulate": Accumulate.SHARDED}
    again, offloaded = dict(sharded), dict(sharded)
    if learner.recompute is not Recompute.ALL_OFFLOADED:
        offloaded["recompute"] = Recompute.ALL_OFFLOADED
        if learner.recompute is not Recompute.ALL:
            again["recompute"] = Recompute.ALL
    groups: list[dict[str, object]] = []
    if learner.shard_ranks is not None:
        larger = range(learner.shard_ranks + 1, learner.world_size)
        groups = [{"shard_ranks": size} for size in larger if learner.world_size % size == 0]
        groups.append({"shard_ranks": None})
    for changes in ((sharded, again), (offloaded,)):  # host memory only where no number of ranks helps
        yield from filter(None, changes)
        for change in changes:
            yield from (change | group for group in groups)
            whole = groups[-1] if groups else {}
            for ranks in range(learner.world_size + 1, MOST_RANKS + 1):
                yield change | whole | {"world_size": ranks}


def _written(value: object) -> str:
    return "null" if value is None else str(value)


def _needs(column: GpuMemory, gpu_bytes: float) -> str:
    return f"{_gpu_of(column)} needs {column.total / 1e9:.1f} GB and has {gpu_bytes / 1e9:.1f}"


def _gpu_of(column: GpuMemory) -> str:
    """Name the GPU of a column."""
    in_turn = column.kind in (LEARNERS_TURN, REPLICAS_TURN)
    return f"a shared GPU in the {column.kind}" if in_turn else f"a GPU of the {column.kind}"


# ---- frozen models as stages


def _stage_column(stage: Source, config: RunConfig, shape: ModelShape, gpu_bytes: float) -> GpuMemory | None:
    """Return the column of a frozen model; None if no formula knows its shape. `shape` is the policy's."""
    algorithm = config.algorithm
    folder = algorithm.reference if stage is Source.REFERENCE else algorithm.teacher_folder
    own = shape if folder is None else shape_at(folder)
    if own is None:
        return None

    def parts(tokens: int) -> Parts:
        return with_spare(frozen_memory(own, tokens=tokens, offload=config.learner.offload), gpu_bytes)

    def total(tokens: int) -> float:
        return sum(parts(tokens).values())

    asked = config.packer.max_tokens
    fitting = bisect_right(range(1, MOST_TOKENS), gpu_bytes, key=total)
    return GpuMemory(kind=str(stage), parts=parts(asked), host=0.0, asked=asked, fitting=fitting)


def _stage_fault(config: RunConfig, column: GpuMemory, gpu_bytes: float) -> str | None:
    """Return an error line if a frozen model does not fit its GPU; else None."""
    if column.total <= gpu_bytes:
        return None
    if column.fitting >= config.rollout.max_len:
        return f"packer.max_tokens={column.asked}: {_needs(column, gpu_bytes)}; set it to {column.fitting}"
    setting, remedy = STAGE_SETTINGS[column.kind]
    return f"{setting}: {_needs(column, gpu_bytes)}; {remedy}, or set learner.offload=true"


# ---- engines


def engine_parts(shape: ModelShape, config: RunConfig, *, gpu_bytes: float) -> Parts:
    """Return the bytes of an engine's GPU. Without `rollout.kv_capacity` the cache takes all free memory."""
    engine, rollout = config.rollout.engine, config.rollout
    fills = rollout.kv_capacity is None
    return engine_memory(
        shape,
        gpus=engine.gpus,
        kv_tokens=None if fills else rollout.kv_tokens,
        static_bytes=engine.static_share * gpu_bytes,
        gpu_bytes=gpu_bytes,
    )


def _cache_room(config: RunConfig, shape: ModelShape, gpu_bytes: float) -> Callable[[int], int]:
    """Return a function from an engine's number of GPUs to the tokens of KV cache that fit."""
    static = config.rollout.engine.static_share * gpu_bytes
    return lambda gpus: cache_tokens(shape, gpus=gpus, static_bytes=static)


def _engine_fault(config: RunConfig, column: GpuMemory, gpu_bytes: float) -> str | None:
    """Complaint about weights and cache that do not fit, or about a cache that has no room for one trajectory."""
    engine, rollout = config.rollout.engine, config.rollout
    shape = shape_at(config.model.path)
    assert shape is not None, "a column has a shape"
    room, here, too_large = _cache_room(config, shape, gpu_bytes), column.fitting, column.total > gpu_bytes
    if here >= rollout.max_len:
        return _cache_fault(config, column, gpu_bytes, room=here) if too_large else None
    why = (
        f"a GPU of the engine has room for {here} tokens of KV cache, less than rollout.max_len={rollout.max_len}"
    )
    if too_large:
        why = _needs(column, gpu_bytes)
    enough = next((gpus for gpus in shape.divisions if gpus > engine.gpus and room(gpus) >= rollout.max_len), None)
    if enough is None:
        return (
            f"rollout.max_len={rollout.max_len}: {why}, on any number of GPUs that the model's heads divide over;"
            " lower it, or serve a smaller model"
        )
    further = ""
    if rollout.kv_capacity is not None and room(enough) < rollout.kv_capacity:
        further = f" and rollout.kv_capacity to {_rounded(room(enough), rollout.max_len)}"
    return f"{engine.placed_by}={engine.gpus}: {why}; set it to {enough}{further}"


def _cache_fault(config: RunConfig, column: GpuMemory, gpu_bytes: float, *, room: int) -> str:
    rollout, static = config.rollout, config.rollout.engine.static_share * gpu_bytes
    return (
        f"rollout.kv_capacity={rollout.kv_capacity}: {_needs(column, gpu_bytes)}, of which weights and cache may"
        f" take {static / 1e9:.1f}; set it to {_rounded(room, rollout.max_len)}"
    )


def _rounded(room: int, least: int) -> int:
    """Tokens of a cache, in thousands, that fit in a room for `least` or more."""
    return max(room // 1000 * 1000, least)


# ---- GPUs that learner and replicas share


def _turn_columns(shape: ModelShape, config: RunConfig, gpu_bytes: float) -> list[GpuMemory]:
    learner = _learner_gpu(shape, config, gpu_bytes)
    learners, replicas = _turns(shape, config, gpu_bytes)
    beside = sum(learners.values()) - sum(learner.values())
    packed = _most_packed(shape, config, gpu_bytes, beside=beside)
    cached = _shared_room(shape, config, gpu_bytes)
    return [
        _column_of_learner(LEARNERS_TURN, learners, shape, config, packed),
        GpuMemory(kind=REPLICAS_TURN, parts=replicas, host=0.0, asked=config.rollout.kv_capacity, fitting=cached),
    ]


def _turns(shape: ModelShape, config: RunConfig, gpu_bytes: float) -> tuple[Parts, Parts]:
    return turn_parts(
        _learner_gpu(shape, config, gpu_bytes),
        lambda left: engine_parts(shape, config, gpu_bytes=left),
        gpu_bytes=gpu_bytes,
        keeps_cache=config.lease_cache is LeaseCache.KEEP,
    )


def _shared_room(shape: ModelShape, config: RunConfig, gpu_bytes: float) -> int:
    engine = config.rollout.engine
    return shared_cache_tokens(
        shape,
        _learner_gpu(shape, config, gpu_bytes),
        gpus=engine.gpus,
        static_share=engine.static_share,
        gpu_bytes=gpu_bytes,
        keeps_cache=config.lease_cache is LeaseCache.KEEP,
    )


def _turn_fault(config: RunConfig, columns: Sequence[GpuMemory], gpu_bytes: float) -> str | None:
    """Return an error line if learner and engine cannot share a GPU, with the part to give up; else None."""
    shape, longest = shape_at(config.model.path), config.rollout.max_len
    for column in columns:
        why = _needs(column, gpu_bytes)
        if column.kind == REPLICAS_TURN and column.fitting < longest:
            why = f"{_gpu_of(column)} has room for {column.fitting} tokens of KV cache, less than {longest}"
        elif column.kind not in (LEARNERS_TURN, REPLICAS_TURN) or column.total <= gpu_bytes:
            continue
        assert shape is not None, "a column has a shape"
        return f"cluster.share=true: {why}; {_turn_remedy(shape, config, gpu_bytes)}"
    return None


def _turn_remedy(shape: ModelShape, config: RunConfig, gpu_bytes: float) -> str:
    """Return the part to give up so that learner and engine share a GPU, the cheapest first."""
    asked, longest = config.rollout.kv_capacity, config.rollout.max_len
    for changed, words in _turn_changes(config):
        room = _shared_room(shape, changed, gpu_bytes)
        if room < longest:
            continue
        if asked is None or asked > room:
            lowered = _rounded(room, longest)
            rollout = changed.rollout.model_copy(update={"kv_capacity": lowered})
            changed = changed.model_copy(update={"rollout": rollout})
            words = [*words, f"lower rollout.kv_capacity to {lowered}"]
        if words and all(sum(parts.values()) <= gpu_bytes for parts in _turns(shape, changed, gpu_bytes)):
            return ", and ".join(words)
    return "set it to false, and give replicas GPUs of their own"


def _turn_changes(config: RunConfig) -> Iterator[tuple[RunConfig, list[str]]]:
    """Yield configs that need less memory on a shared GPU, with the words for each; the first is as it is."""
    cluster, learner, words = config.cluster, config.learner, list[str]()
    yield config, words
    if config.lease_cache is LeaseCache.KEEP:
        lease = cluster.lease.model_copy(update={"cache": LeaseCache.RELEASE})
        config = config.model_copy(update={"cluster": cluster.model_copy(update={"lease": lease})})
        words = ["set cluster.lease.cache=release"]
        yield config, words
    if learner.recompute in (Recompute.NONE, Recompute.SELECTIVE):
        learner = learner.model_copy(update={"recompute": Recompute.ALL})
        words = [*words, "set learner.recompute=all"]
        yield config.model_copy(update={"learner": learner}), words
    changes: list[tuple[dict[str, object], str]] = []
    if learner.lora is None:
        changes.append(({"lora": LoraConfig()}, "train by adapter (learner.lora)"))
    whole = "" if learner.shard_ranks is None else " with learner.shard_ranks=null"
    for ranks in range(learner.world_size + 1, MOST_RANKS + 1):
        more: dict[str, object] = {"world_size": ranks, "shard_ranks": None}
        changes.append((more, f"raise learner.world_size to {ranks}{whole}"))
    policy = config.rollout.on_new_weights
    for change, what in changes:
        # SGLang keeps a running request on its adapter
        resumes = "lora" in change and policy in (OnNewWeights.RETRACT, OnNewWeights.IN_PLACE)
        more_words = ["set rollout.on_new_weights=resume"] if resumes else []
        yield config.model_copy(update={"learner": learner.model_copy(update=change)}), [*words, what, *more_words]
