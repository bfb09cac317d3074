"""Settings of the learner: optimisation, adapters, microbatches."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.data import ModelConfig, WarmStartConfig
from laminar_py.config.rollout import RolloutConfig
from laminar_py.config.section import ConfigError, Count, Section


class LoraTarget(StrEnum):
    """Projections of a layer."""

    Q_PROJ = "q_proj"
    K_PROJ = "k_proj"
    V_PROJ = "v_proj"
    O_PROJ = "o_proj"
    GATE_PROJ = "gate_proj"
    UP_PROJ = "up_proj"
    DOWN_PROJ = "down_proj"


class LoraConfig(Section):
    """Low-rank adapters: they alone are trained, checkpointed and published. Engines get the base from the folder
    that the learner has it from, `model.path` or the warm start's cache, which all hosts see under that path."""

    rank: Count = 16
    """Rows of A and columns of B: the adapted weight is `W + alpha / rank * B A`."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapters, times `rank`."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] = tuple(LoraTarget)
    """Projections that are adapted in every layer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ConfigError(f"learner.lora.targets={','.join(self.targets)}: one is named twice; name each once")
        return self


def check_lora(
    lora: LoraConfig | None, model: ModelConfig, warm_start: WarmStartConfig | None, *, emulated: bool
) -> None:
    """Refuse adapters without a base. A backend checks which adapters its engines can serve."""
    if lora is None:
        return
    if model.from_scratch and warm_start is None:
        raise ConfigError(
            "model.from_scratch=true: with learner.lora only adapters are published, and engines would have no"
            " base; name a folder with weights, or a warm_start"
        )
    if emulated:
        raise ConfigError("learner.lora: an emulated learner has no weights to adapt; leave learner.lora out")


class Decay(StrEnum):
    """How the learning rate falls after its warm-up."""

    NONE = "none"
    LINEAR = "linear"
    COSINE = "cosine"


class Recompute(StrEnum):
    """Activations that are computed again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    ALL = "all"


class Accumulate(StrEnum):
    """Gradients that a rank keeps between the microbatches of an update."""

    SHARDED = "sharded"
    WHOLE = "whole"


class LearnerConfig(Section):
    """Optimisation."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate of AdamW, after its warm-up. The default is for billions of parameters; a model of 245,000
    learns with 1e-3."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises to `lr`, linearly."""
    decay: Decay = Decay.NONE
    """`linear` or `cosine`: the learning rate falls from there to 0 at the last of `steps`. `none`: it stays."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm."""
    world_size: Count = 1
    """Data-parallel ranks (FSDP2), each in a process of its own."""
    recompute: Recompute = Recompute.NONE
    """Activations that the backward pass computes again instead of keeping them, for long microbatches. `all` of a
    layer: a third more work, and memory for one layer instead of all. `selective`: attention and every second
    matrix product are kept; about a sixth more work."""
    compile: bool = False
    """Compile each layer (`torch.compile`): faster on GPUs, after some minutes at the start."""
    offload: bool = False
    """Keep master weights, gradients and optimizer in the memory of the host, and update them there: 16 bytes a
    parameter less on GPUs, and a slower step. Only with a learner on GPUs."""
    accumulate: Accumulate = Accumulate.SHARDED
    """Gradients between the microbatches of an update. `sharded`: every microbatch sums them over the ranks, in
    fp32, and a rank keeps its share, 4 bytes a parameter over `world_size`. `whole`: a rank keeps those of all
    parameters, 4 bytes each, and they are summed once an update: less traffic between ranks. With one rank on its
    own memory both are the same."""
    lora: LoraConfig | None = None
    """Train adapters in place of all weights, or none."""
    publish_every: Count = 1
    """Learner steps between two weight versions."""
    checkpoint_every: Count = 20
    """Learner steps between two checkpoints. They are written beside them, from a copy in the host's memory of 12
    bytes a parameter."""
    keep_checkpoints: Count = 2
    """Checkpoints kept on disk. One that is to stay longer needs a copy or another name."""


class PackerConfig(Section):
    """How finished trajectories become microbatches."""

    max_tokens: Count = 8192
    """Tokens of one microbatch, at most."""
    look_ahead: Annotated[int, Field(ge=0)] = 0
    """Ready groups beyond those of a step that may be taken in place of older ones, so that a step fills whole
    microbatches on all ranks; none is passed over more than twice. 0: staleness order alone. It pays where a step
    has few microbatches."""


def check_microbatches(packer: PackerConfig, rollout: RolloutConfig) -> None:
    """Refuse microbatches that the longest trajectory does not fit."""
    if rollout.max_len > packer.max_tokens:
        raise ConfigError(
            f"packer.max_tokens={packer.max_tokens} is below rollout.max_len={rollout.max_len}, so a long"
            " trajectory fits no microbatch; raise packer.max_tokens"
        )
