"""Memory of a run's GPUs, by use: a formula over a config and a model's shape.

Called by `laminar doctor`, `laminar plan` and, before processes start, `laminar train`. The learner's memory is
its peak, the largest of three moments of a step: the backward pass of the output embedding, of a layer, and the
reduction of the embeddings' gradients at the end. Sizes of activations follow transformers' layers: bf16, with
norms in fp32; a norm that `learner.layers` has fused takes less. States of the learner, weights and KV cache of an
engine are exact; activations and the memory that CUDA and its allocator keep are estimates
(`tests/doctor/test_memory.py`).
"""

import itertools
import math
import subprocess
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from laminar_lab.model_shape import ModelShape, kv_token_bytes
from laminar_lab.plan.known_models import shape_at
from laminar_py.config.cluster import Device
from laminar_py.config.learner import Accumulate, LearnerConfig, Recompute, ReduceDtype
from laminar_py.config.run import RunConfig
from laminar_py.records.codec import encode

GPU_BYTES = 80e9  # assumed size of a GPU
HEAD_TOKENS = 2048  # tokens with logits at the same time: `learner.losses.logprob.FUSED_CHUNK`
SPARE_SHARE = 0.05  # of a GPU, for CUDA, NCCL and what the allocator cannot use
MARGIN = 0.02  # share of a GPU that a plan leaves free, and without which doctor warns
MOST_TOKENS = 1 << 24  # of a microbatch
MOST_RANKS = 1024
INPUTS_HERE = 2  # inputs of layers on a GPU at the same time, the others being on the host: in use, and copied
KINDS = ("learner", "engine")  # of GPUs
COMMAND_TIMEOUT_S = 10.0  # for `nvidia-smi`

Parts = dict[str, float]
"""Bytes by use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """One kind of GPU: `GpuMemory(kind="engine", parts=parts, host=0.0, asked=850_000, fitting=920_000)`."""

    kind: str  # one of `KINDS`; the column's title
    parts: Parts
    host: float  # bytes beside it in pinned host memory, for each GPU: the inputs of a learner's layers
    asked: int | None  # tokens of a microbatch or of an engine's KV cache; None: an engine takes all that fit
    fitting: int  # the most of them that a GPU, or the GPUs of an engine, hold

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.parts.values())


def gpu_memory(
    config: RunConfig, *, gpu_bytes: float = GPU_BYTES, kinds: Collection[str] = KINDS
) -> list[GpuMemory]:
    """Return columns for learner and engine, if they have GPUs; none if no formula knows the model's shape."""
    shape = shape_at(config.model.path)
    if shape is None:
        return []
    columns, engine = [], config.rollout.engine
    if config.learner_device is Device.CUDA:
        columns.append(_learner_column(shape, config, gpu_bytes))
    if engine.gpus and not engine.hosts:
        parts, room = engine_parts(shape, config, gpu_bytes=gpu_bytes), _cache_room(config, shape, gpu_bytes)
        columns.append(
            GpuMemory(
                kind="engine", parts=parts, host=0.0, asked=config.rollout.kv_capacity, fitting=room(engine.gpus)
            )
        )
    return [column for column in columns if column.kind in kinds]


def with_spare(parts: Parts, gpu_bytes: float) -> Parts:
    """Return the bytes of a learner's GPU by part, with the share that CUDA, NCCL and the allocator keep."""
    return parts | {"CUDA, NCCL, fragmentation": SPARE_SHARE * gpu_bytes}


def has_margin(parts: Parts, gpu_bytes: float) -> bool:
    """Return whether a GPU with these parts has `MARGIN` left, since activations are estimates."""
    return sum(parts.values()) <= (1.0 - MARGIN) * gpu_bytes


def memory_faults(config: RunConfig, *, gpu_bytes: float = GPU_BYTES, kinds: Collection[str] = KINDS) -> list[str]:
    """Return an error line for each kind of GPU that the run does not fit, with a setting that would fit."""
    faults = {"learner": _learner_fault, "engine": _engine_fault}
    columns = gpu_memory(config, gpu_bytes=gpu_bytes, kinds=kinds)
    return list(filter(None, (faults[column.kind](config, column, gpu_bytes) for column in columns)))


def memory_warnings(config: RunConfig, *, gpu_bytes: float, kinds: Collection[str] = KINDS) -> list[str]:
    """Return a line for each kind of GPU that the run fits without a margin."""
    settings = {"learner": "raise learner.world_size", "engine": "lower rollout.kv_capacity"}
    return [
        f"a GPU of the {column.kind} holds {column.total / 1e9:.1f} of {gpu_bytes / 1e9:.1f} GB by formula, which"
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
    parts = _learner_gpu(shape, changed, gpu_bytes)
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


def _learner_column(shape: ModelShape, config: RunConfig, gpu_bytes: float) -> GpuMemory:
    def total(tokens: int) -> float:
        packer = config.packer.model_copy(update={"max_tokens": tokens})
        return sum(_learner_gpu(shape, config.model_copy(update={"packer": packer}), gpu_bytes).values())

    fitting = bisect_right(range(1, MOST_TOKENS), gpu_bytes, key=total)
    tokens = config.packer.max_tokens
    return GpuMemory(
        kind="learner",
        parts=_learner_gpu(shape, config, gpu_bytes),
        host=host_inputs(shape, config.learner.recompute, tokens=tokens),
        asked=tokens,
        fitting=fitting,
    )


def _learner_gpu(shape: ModelShape, config: RunConfig, gpu_bytes: float) -> Parts:
    return with_spare(learner_parts(shape, config, reference=_reference_shape(config, shape)), gpu_bytes)


def learner_parts(shape: ModelShape, config: RunConfig, *, reference: ModelShape | None = None) -> Parts:
    """Return the bytes of a learner's GPU at its peak, without CUDA's; `reference` is a second model."""
    learner = config.learner
    beside: Parts = {}
    if reference is not None:  # its embeddings stay gathered after its pass
        held = 0.0 if learner.offload else 4.0 * reference.total / learner.shard_size
        beside = {"reference model": held + 2.0 * reference.root}
    return learner_memory(shape, learner, tokens=config.packer.max_tokens) | beside


def learner_memory(shape: ModelShape, learner: LearnerConfig, *, tokens: int) -> Parts:
    """Return the bytes of a learner's GPU at its peak, with microbatches of `tokens`, without a reference."""
    peaks = _peaks(shape, learner, tokens=tokens)
    return state_parts(shape, learner) | max(peaks, key=lambda parts: sum(parts.values()))


def state_parts(shape: ModelShape, learner: LearnerConfig) -> Parts:
    """Return the bytes of fp32 masters, gradients and AdamW's moments on a rank's GPU."""
    trained = shape.total if learner.lora is None else shape.adapters(learner.lora)
    weights = shape.total + (0 if learner.lora is None else trained)
    ranks, host = learner.shard_size, learner.offload
    gradients = 0.0 if host else 4.0 * trained / ranks
    if learner.accumulate is Accumulate.WHOLE and (learner.world_size > 1 or host):
        gradients = 4.0 * trained
    return {
        "masters (fp32)": 0.0 if host else 4.0 * weights / ranks,
        "gradients (fp32)": gradients,
        "moments (fp32)": 0.0 if host else 8.0 * trained / ranks,
    }


def _peaks(shape: ModelShape, learner: LearnerConfig, *, tokens: int) -> Iterator[Parts]:
    """Yield the bytes beside the states at each moment of a step that may be its peak."""
    root, layer = 2.0 * shape.root, 2.0 * shape.layer  # in bf16, gathered
    head = 2.0 * shape.embedding
    trains = learner.lora is None
    summed = 1.0 if learner.reduce_dtype is ReduceDtype.BFLOAT16 else 2.0  # bytes of a sum's number over bf16's
    kept = activations(shape, learner.recompute, tokens=tokens)
    logits = 4.0 * HEAD_TOKENS * shape.vocab_size  # with their gradient, bf16
    yield {
        "embedding and head (bf16)": root,
        "layers (bf16)": 0.0,
        "activations": kept + 6.0 * tokens * shape.hidden_size,
        "head: logits and gradient": logits + 3 * head,  # summed up in fp32, and once in bf16
    }
    again = 0.0 if learner.recompute is Recompute.NONE else _of_layer(shape)
    if learner.context_parallel > 1:  # queries, keys, values and result, sent and received
        again += 8.0 * (shape.query_width + shape.key_width)
    reduced = summed * (layer + layer / learner.shard_size) if trains else 0.0
    yield {
        "embedding and head (bf16)": root,
        "layers (bf16)": 2 * layer + (layer + reduced if trains else 0.0),  # the next one, gradient, reduction
        "activations": kept + tokens * (again + _of_layer(shape) / 2),  # half: gradients of its results
        "head: logits and gradient": head if trains else 0.0,
    }
    yield {
        "embedding and head (bf16)": root + (summed * (root + root / learner.shard_size) if trains else 0.0),
        "layers (bf16)": 0.0,
        "activations": 0.0,
        "head: logits and gradient": 0.0,
    }


def activations(shape: ModelShape, recompute: Recompute, *, tokens: int) -> float:
    """Return the bytes of activations that the layers keep of a microbatch for its backward pass."""
    entry = 2.0 * shape.hidden_size
    if recompute is Recompute.ALL_OFFLOADED:
        return tokens * INPUTS_HERE * entry
    if recompute is Recompute.NONE:
        each = _of_layer(shape)
    elif recompute is Recompute.ALL:
        each = entry
    else:  # attention's result, and every second of the seven products; grouped ones are computed again
        wide = shape.shared_width if shape.experts else shape.used_width
        products = shape.key_width + shape.hidden_size + wide
        each = entry + 2.0 * (shape.query_width + products)
    return tokens * shape.num_hidden_layers * each


def host_inputs(shape: ModelShape, recompute: Recompute, *, tokens: int) -> float:
    """Return the bytes of a rank's inputs of layers in pinned host memory; torch rounds each to a power of two."""
    if recompute is not Recompute.ALL_OFFLOADED:
        return 0.0
    return shape.num_hidden_layers * 2.0 ** math.ceil(math.log2(tokens * 2 * shape.hidden_size))


def _of_layer(shape: ModelShape) -> float:
    """Return the bytes for each token that a layer computes and its backward pass needs."""
    norms = 16.0 * shape.hidden_size  # two, each its input in fp32, the same normalised, and its result
    queries, keys = shape.query_width, shape.key_width
    attention = 4.0 * queries + 4.0 * keys  # queries, keys, values, result
    if shape.normalises_heads:
        attention += 6.0 * (queries + keys)
    routed = 0.0
    if shape.experts:  # rows sorted by expert, weighted products, four tables of places, probabilities
        chosen = shape.num_experts_per_tok or 1
        weighted = 2.0 * (shape.used_width - shape.shared_width)
        routed = 2.0 * shape.hidden_size * chosen + weighted + 32.0 * chosen + 4.0 * shape.experts
    return norms + attention + routed + 8.0 * shape.used_width  # gate, its activation, up, their product


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
            shared = {
                "context_parallel": size,
                "world_size": ranks,
                "shard_ranks": None,
                "recompute": Recompute.ALL_OFFLOADED
                if learner.recompute is Recompute.ALL_OFFLOADED
                else Recompute.ALL,
            }
            parts = learner_memory(shape, learner.model_copy(update=shared), tokens=each)
            if has_margin(with_spare(parts, gpu_bytes), gpu_bytes):
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
    return f"a GPU of the {column.kind} needs {column.total / 1e9:.1f} GB and has {gpu_bytes / 1e9:.1f}"


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


def engine_memory(
    shape: ModelShape,
    *,
    gpus: int,
    kv_tokens: int | None,
    static_bytes: float,
    gpu_bytes: float,
    width: float | None = None,
) -> Parts:
    """Return the bytes on each GPU of an engine; a cache of None takes the rest of `static_bytes`.

    A number has `width` bytes, by default as many as engines serve.
    """
    width = width or shape.served_bytes
    weights = width * shape.total / gpus
    cache = max(0.0, static_bytes - weights)
    if kv_tokens is not None:
        cache = kv_token_bytes(shape, gpus, width=width) * kv_tokens
    rest = gpu_bytes - static_bytes
    return {"engine's weights": weights, "KV cache": cache, "engine's activations, CUDA graphs": rest}


def cache_tokens(shape: ModelShape, *, gpus: int, static_bytes: float) -> int:
    """Return the tokens of KV cache that fit beside the weights into `static_bytes` of each GPU."""
    left = static_bytes - shape.served_bytes * shape.total / gpus
    return max(0, int(left / kv_token_bytes(shape, gpus)))


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
