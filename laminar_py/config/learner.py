"""Settings of the learner: optimisation, adapters, microbatches."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.rollout import RolloutConfig
from laminar_py.config.section import ConfigError, Count, Section


class LoraTarget(StrEnum):
    """Projections of a layer that adapters may change."""

    Q_PROJ = "q_proj"
    K_PROJ = "k_proj"
    V_PROJ = "v_proj"
    O_PROJ = "o_proj"
    GATE_PROJ = "gate_proj"
    UP_PROJ = "up_proj"
    DOWN_PROJ = "down_proj"


class LoraConfig(Section):
    """Low-rank adapters, which alone are trained, checkpointed and published. Engines read the base from the
    learner's folder (`model.path` or the warm start's cache), which all hosts must see under the same path."""

    rank: Count = 16
    """Rows of A and columns of B: the adapted weight is `W + alpha / rank * B A`."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapters, times `rank`."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] = tuple(LoraTarget)
    """Projections with adapters, in every layer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ConfigError(
                f"learner.lora.targets={','.join(self.targets)}: a name occurs twice; name each once"
            )
        return self


def check_lora(lora: LoraConfig | None, *, random_start: bool, quantizes: bool) -> None:
    """Raise `ConfigError` for adapters whose base model has no folder or is rounded; backends check layers."""
    if lora is not None and quantizes:
        raise ConfigError(
            "rollout.engine.quantization: rounds published weights, and learner.lora publishes adapters alone;"
            " leave out one of the two"
        )
    if lora is not None and random_start:
        raise ConfigError(
            "model.from_scratch=true: with learner.lora only adapters are published, so engines need the base"
            " in a folder; name a folder with weights, or a warm_start"
        )


def check_rounding(learner: "LearnerConfig", *, quantizes: bool, refers: bool) -> None:
    """Raise `ConfigError` for a learner that rounds weights alone, without engines or without its reference."""
    if not learner.rounds_weights:
        return
    if not quantizes:
        raise ConfigError(
            "learner.rounds_weights=true: engines serve weights as published; set rollout.engine.quantization=fp8"
            " (with a larger max_mismatch in a run that went back from it), or learner.rounds_weights=false"
        )
    if refers:
        raise ConfigError(
            "learner.rounds_weights=true: a reference model or a teacher is not rounded, so that a policy would"
            " differ from it at the start; leave out one of the two"
        )


class Decay(StrEnum):
    """How the learning rate falls after its warm-up."""

    NONE = "none"
    LINEAR = "linear"
    COSINE = "cosine"


class Recompute(StrEnum):
    """Activations that the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"
    ALL = "all"
    ALL_OFFLOADED = "all_offloaded"


class Attention(StrEnum):
    """Attention kernels of the learner; see `LearnerConfig.attention`."""

    AUTO = "auto"
    VARLEN = "varlen"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    FLASH4 = "flash4"
    SDPA = "sdpa"


class Accumulate(StrEnum):
    """Gradients that a rank keeps between microbatches of an update."""

    SHARDED = "sharded"
    WHOLE = "whole"


class ReduceDtype(StrEnum):
    """Numbers in which ranks add up gradients."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class LearnerConfig(Section):
    """Optimisation."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate of AdamW after its warm-up. The default is for billions of parameters; a model of 245,000
    parameters learns with 1e-3. Adapters (`lora`) need about twenty times the rate of all weights, since they
    begin at no change at all: 1.5e-4 at 135 million parameters (measured), 2e-5 at 7 billion."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of the linear warm-up to `lr`."""
    decay: Decay = Decay.NONE
    """`linear` or `cosine`: the learning rate falls from `lr` towards 0, which it would have one step after the
    last. `none`: it stays."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm."""
    world_size: Count = 1
    """Data-parallel ranks (FSDP2), each in a process of its own. `laminar set` changes them in a running run."""
    shard_ranks: Count | None = None
    """Ranks that share one copy of weights, gradients and optimizer; each further group of as many ranks has its
    own (HSDP). None: all ranks share one. On several nodes set it to the ranks of a node: then microbatches gather
    weights over NVLink, and only the gradients' sum crosses nodes, once an update. A GPU holds more for it;
    `laminar doctor` says how much, and `laminar plan` sets it where it fits."""
    context_parallel: Count = 1
    """Neighbouring ranks that share each microbatch, which then holds `packer.max_tokens` for each of them. So a
    trajectory may exceed one rank's tokens. It must divide `world_size` and the model's key-value heads."""
    reduce_dtype: ReduceDtype = ReduceDtype.FLOAT32
    """Numbers in which ranks add up gradients. `bfloat16` halves their traffic, and rounds each sum to 8 bits."""
    recompute: Recompute = Recompute.NONE
    """Activations that the backward pass computes again, to save memory in long microbatches. `all`: the values of
    each layer, which costs a third more work and keeps each layer's input and the memory of one layer.
    `selective`: all except attention and every second matrix product, about a sixth more work. `all_offloaded`: as
    `all`, and a GPU's inputs wait in the host's pinned memory for the backward pass, so that the number of layers
    does not count. It is for microbatches that fit in no other way."""
    attention: Attention = Attention.AUTO
    """Attention kernel. `varlen`: torch's own, on GPUs. `flash2`, `flash3`, `flash4`: FlashAttention, on GPUs with
    its package; 3 is for Hopper, 4 is a beta. `sdpa`: torch's SDPA, sequence by sequence. `auto`: on a CPU `sdpa`,
    on GPUs the first of `flash3` (on Hopper), `flash2`, `varlen`, `flash4` and `sdpa` that is installed and passes
    a check. Each rank compares its kernel with plain attention when it starts: the output and all gradients."""
    compile: bool = False
    """Compile each layer (`torch.compile`): faster on GPUs, with some minutes more at the start."""
    offload: bool = False
    """Keep master weights, gradients and optimizer in the host's memory, and update them there: saves 16 bytes a
    parameter on GPUs and makes a step slower. Only with a learner on GPUs."""
    accumulate: Accumulate = Accumulate.SHARDED
    """Gradients between microbatches of an update. `sharded`: ranks sum them after every microbatch, and each rank
    keeps its share in fp32: 4 bytes a parameter over `shard_ranks`. `whole`: each rank keeps the gradients of all
    parameters, 4 bytes each, and ranks sum them once an update, which saves traffic. With one rank both are the
    same."""
    rounds_weights: bool = False
    """With `rollout.engine.quantization`: compute with weights rounded to e4m3 by blocks of 128 x 128, as `local`
    does, so that rounding is no mismatch. SGLang has scales of its own, and nothing was measured with it. The
    optimizer updates the unrounded weights. A mismatch beyond the bound is an alarm (`alarms.probes`). Not for
    models with experts, nor beside a reference model or a teacher."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights; none: train all weights."""
    publish_every: Count = 1
    """Learner steps between two weight versions."""
    checkpoint_every: Count = 20
    """Learner steps between two checkpoints. A checkpoint is written while later steps run, from a copy in the
    host's memory of 12 bytes a parameter."""
    keep_checkpoints: Count = 2
    """Newest checkpoints to keep on disk. Copy or rename a checkpoint to keep it longer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.world_size % self.shard_size:
            divisors = [str(size) for size in range(1, self.world_size + 1) if self.world_size % size == 0]
            raise ConfigError(
                f"learner.shard_ranks={self.shard_ranks}: groups of so many do not divide learner.world_size="
                f"{self.world_size}; set it to {', '.join(divisors)}, or leave it out"
            )
        if self.world_size % self.context_parallel:
            next_multiple = self.context_parallel * -(-self.world_size // self.context_parallel)
            raise ConfigError(
                f"learner.context_parallel={self.context_parallel}: does not divide learner.world_size="
                f"{self.world_size}; raise world_size to {next_multiple}"
            )
        return self

    @property
    def num_rows(self) -> int:
        """Microbatches that the ranks train on at a time: one for all ranks of a context."""
        return self.world_size // self.context_parallel

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy: `shard_ranks`, by default all."""
        return self.shard_ranks or self.world_size


class PackerConfig(Section):
    """How finished trajectories become microbatches."""

    max_tokens: Count = 8192
    """Most tokens of one microbatch on a rank."""


def check_microbatches(
    packer: PackerConfig, learner: LearnerConfig, rollout: RolloutConfig, *, staged: bool
) -> None:
    """Raise `ConfigError` if a microbatch, or a process of a frozen model (`staged`), cannot hold a trajectory."""
    ranks = learner.context_parallel
    if staged and rollout.max_len > packer.max_tokens:
        raise ConfigError(
            f"packer.max_tokens={packer.max_tokens} is below rollout.max_len={rollout.max_len}, and a stage of"
            " algorithm.reference_pass or algorithm.teacher has one rank; raise packer.max_tokens"
        )
    if rollout.max_len > packer.max_tokens * ranks:
        held = f"packer.max_tokens={packer.max_tokens}" + (f" on {ranks} ranks" if ranks > 1 else "")
        raise ConfigError(
            f"{held} is below rollout.max_len={rollout.max_len}, so a long trajectory fits into no microbatch;"
            " raise packer.max_tokens or learner.context_parallel"
        )


def check_heads(kv_heads: int, context_parallel: int) -> None:
    """Raise `ConfigError` unless a model's key-value heads can be divided among the ranks of a context."""
    if kv_heads % context_parallel:
        divisors = [str(size) for size in range(1, kv_heads + 1) if kv_heads % size == 0]
        raise ConfigError(
            f"learner.context_parallel={context_parallel}: the model has {kv_heads} key-value heads, which so many"
            f" ranks cannot divide; set it to {', '.join(divisors)}"
        )
