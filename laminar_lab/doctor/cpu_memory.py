"""Memory of a run whose learner and engines compute on the cores of one machine, by a formula.

Called by `laminar doctor`. Everything is in fp32. The formula is within 20 % of the learners and replicas of
`experiments/smollm2/README.md#memory` (`tests/doctor/test_cpu_memory.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from laminar_lab.doctor.gpu_formula import Parts, activations, critic_parts, state_parts
from laminar_lab.model_shape import ModelShape, kv_token_bytes
from laminar_lab.plan.known_models import shape_at
from laminar_lab.step_time import version_bytes
from laminar_py.config.cluster import Device
from laminar_py.config.learner import Recompute
from laminar_py.config.run import RunConfig
from laminar_py.records.columns import Source
from laminar_py.records.host import counted

OTHERS = "all other processes"
EMBEDDED = "local"  # the kind of engines that compute in their replica's process
CPU_ACTIVATIONS = 3.1  # bytes over the formula in bf16: fp32, temporaries of a layer, holes of the heap
HEAD_TOKENS = 512  # with logits at the same time: `learner.losses.logprob.CHUNK`
LOGITS = 3.0  # copies of them, in fp32
PROCESS_BYTES = 0.4e9  # of a process with torch
REST_BYTES = 0.5e9  # of controller, scorers and relays
KEPT_MORE = 2  # versions that a relay holds beside `relay.keep_versions`
MICROBATCHES = (1024, 512)  # tokens that take no more time for each token than larger ones do, on cores
LAST_REMEDIES = {  # where no microbatch fits, by the largest part
    "KV cache": "lower rollout.max_batch or rollout.replicas",
    "versions in shared memory": "lower relay.keep_versions or relay.nodes",
    "activations": "train a smaller model",
    "weights": "train a smaller model, or lower rollout.replicas",
}
FULL = 0.8  # share of the memory from which doctor warns, since activations are estimates


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """Peak bytes of equal processes, e.g. `CpuMemory("learner", 1, {"activations": 1.1e9})`."""

    kind: str
    number: int  # of such processes
    parts: Parts  # of one

    @property
    def total(self) -> float:
        """Bytes of all."""
        return self.number * sum(self.parts.values())


def cpu_memory(config: RunConfig) -> list[CpuMemory]:
    """Return the memory of a run by kind of process.

    [] where parts are on GPUs or other nodes, engines are servers, or no formula knows the model.
    """
    shape = shape_at(config.model.path)
    here = config.learner_device is Device.CPU and config.cluster.address is None
    if shape is None or not here or config.rollout.engine.kind != EMBEDDED:
        return []
    learner, rollout, relay = config.learner, config.rollout, config.relay
    published = shape.total if learner.lora is None else shape.adapters(learner.lora)
    versions = relay.nodes * (relay.keep_versions + KEPT_MORE) + rollout.replicas
    merged = {} if learner.lora is None else {"base of the adapters": 4.0 * shape.total}
    replica = {
        "weights": 4.0 * shape.total,
        **merged,
        "KV cache": kv_token_bytes(shape, 1, width=4.0) * rollout.kv_tokens,
        "process": PROCESS_BYTES,
    }
    rest = {"versions in shared memory": versions * 2.0 * version_bytes(published), "process": REST_BYTES}
    return [
        CpuMemory("learner", learner.world_size, _learner_parts(shape, config)),
        CpuMemory("replica", rollout.replicas, replica),
        *(
            CpuMemory(str(stage), 1, _stage_parts(shape, config, stage))
            for stage in config.algorithm.computing_stages
        ),
        CpuMemory(OTHERS, 1, rest),
    ]


def _learner_parts(shape: ModelShape, config: RunConfig) -> Parts:
    learner, tokens = config.learner, config.packer.max_tokens
    kept = activations(shape, learner.recompute, tokens=tokens)
    if learner.recompute is Recompute.ALL_OFFLOADED:  # to where they are
        kept += activations(shape, Recompute.ALL, tokens=tokens)
    if learner.recompute is not Recompute.NONE:  # a layer computes again
        kept += activations(shape, Recompute.NONE, tokens=tokens) / shape.num_hidden_layers
    critic = {} if config.algorithm.critic is None else critic_parts(shape, learner)
    return (
        state_parts(shape, learner)
        | critic
        | {
            "activations": CPU_ACTIVATIONS * kept,
            "logits": LOGITS * 4.0 * min(tokens, HEAD_TOKENS) * shape.vocab_size,
            "process": PROCESS_BYTES,
        }
    )


def _stage_parts(policy: ModelShape, config: RunConfig, stage: Source) -> Parts:
    """Return the bytes of a frozen model's process, whose layers keep nothing; nobody has measured it."""
    folder = config.algorithm.reference if stage is Source.REFERENCE else config.algorithm.teacher_folder
    shape, tokens = (None if folder is None else shape_at(folder)) or policy, config.packer.max_tokens
    kept = activations(shape, Recompute.NONE, tokens=tokens) / shape.num_hidden_layers
    return {
        "weights": 4.0 * shape.total,
        "activations": CPU_ACTIVATIONS * kept,
        "logits": 4.0 * min(tokens, HEAD_TOKENS) * shape.vocab_size,
        "process": PROCESS_BYTES,
    }


def cpu_faults(config: RunConfig, *, memory: float) -> tuple[list[str], list[str]]:
    """Return warnings and errors of a run on a machine with so many bytes, each with a setting that fits."""
    total = _total(config)
    if total <= FULL * memory:
        return [], []
    line = (
        f"packer.max_tokens={config.packer.max_tokens}: the run needs {total / 1e9:.1f} GB at its peak by formula,"
        f" and this machine has {memory / 1e9:.1f}; {_remedy(config, memory)}"
    )
    return ([line], []) if total <= memory else ([], [line])


def _remedy(config: RunConfig, memory: float) -> str:
    """Return the change that makes the run fit with room, the cheapest first."""
    for change, words in _changes(config):
        if (total := _total(change)) <= FULL * memory:
            return f"{words}, which needs {total / 1e9:.1f}"
    sizes = {name: column.number * size for column in cpu_memory(config) for name, size in column.parts.items()}
    largest = max(LAST_REMEDIES, key=lambda name: sizes[name])
    return f"{LAST_REMEDIES[largest]}, since {largest} takes {sizes[largest] / 1e9:.1f}"


def _changes(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """Yield smaller microbatches, the larger first, then activations that are computed again."""
    present, longest = config.packer.max_tokens, config.rollout.max_len
    sizes = [tokens for tokens in dict.fromkeys(max(size, longest) for size in MICROBATCHES) if tokens < present]
    for tokens in sizes:
        yield _with(config, tokens, config.learner.recompute), f"set it to {tokens}"
    yield _with(config, present, Recompute.ALL), "set learner.recompute to all"
    for tokens in sizes:
        yield _with(config, tokens, Recompute.ALL), f"set it to {tokens}, and learner.recompute to all"


def _with(config: RunConfig, max_tokens: int, recompute: Recompute) -> RunConfig:
    packer = config.packer.model_copy(update={"max_tokens": max_tokens})
    learner = config.learner.model_copy(update={"recompute": recompute})
    return config.model_copy(update={"packer": packer, "learner": learner})


def _total(config: RunConfig) -> float:
    return sum(column.total for column in cpu_memory(config))


def memory_rows(columns: Sequence[CpuMemory]) -> Iterator[tuple[str, str, str]]:
    """Yield rows of a table: processes, their parts in GB, GB of all."""
    for column in columns:
        parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in column.parts.items() if size >= 5e6)
        name = column.kind if column.number == 1 else counted(column.number, column.kind)
        yield name, parts, f"{column.total / 1e9:.1f}"
