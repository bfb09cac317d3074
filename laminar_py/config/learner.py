"""Settings of the learner."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from laminar_py.config.lora import LoraConfig
from laminar_py.config.section import Count, Section


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
