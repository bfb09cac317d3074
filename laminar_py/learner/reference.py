"""Frozen models, whose log-probabilities the loss compares with the policy's: the reference and the teacher.

The reference runs in the learner (`InnerReference`, called by `step`), or as a stage in a process of its own
(`FrozenModel`, called by `workers.processes.learner`). Both run the same forward at the same temperature over
the same part of the vocabulary, so a token gets the same number (`tests/learner/test_reference.py`). A teacher
that has a folder is always a stage.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from laminar_py.config.algorithm import Aggregation, AlgorithmConfig
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import Attention
from laminar_py.learner.model import fingerprint, load_frozen, local_part, policy_logprobs
from laminar_py.learner.packing.layout import cut_tree, lay_out
from laminar_py.learner.packing.packer import StepWeights, microbatch
from laminar_py.learner.sharding import shard
from laminar_py.records.codec import FloatArray
from laminar_py.records.columns import REFERENCE_LOGPROBS
from laminar_py.records.trajectory import MicroBatch, Trajectory

if TYPE_CHECKING:  # peft is an extra, and takes seconds to import
    from laminar_py.learner.lora import LoraAdapters


class InnerReference:
    """A reference inside the learner: a separate `model`, or the policy with its `adapters` switched off."""

    def __init__(self, model: PreTrainedModel, *, adapters: "LoraAdapters | None" = None) -> None:
        self.model = model
        self._adapters = adapters

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that may not change: all, or those beneath the policy's adapters."""
        return [one for one in self.model.parameters() if self._adapters is None or not one.requires_grad]

    def add_logprobs(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return copies of the microbatches that have the reference's log-probabilities as a column."""
        completed = []
        with nullcontext() if self._adapters is None else self._adapters.disabled():
            for batch in batches:
                columns = batch.columns | {REFERENCE_LOGPROBS: _logprobs(self.model, batch)}
                completed.append(msgspec.structs.replace(batch, columns=columns))
        return completed


def open_reference(
    policy: PreTrainedModel,
    algorithm: AlgorithmConfig,
    *,
    start: Path,
    adapters: "LoraAdapters | None",
    temperature: float,
    mesh: DeviceMesh | None,
    offload: bool,
) -> InnerReference | None:
    """Load and shard the reference that runs inside the learner.

    Returns None if the algorithm has no reference, or runs it in a process of its own. `start` is the folder of
    the model that RL starts with, the reference if the config names no other.
    """
    if not algorithm.has_reference or algorithm.reference_in_own_process:
        return None
    if algorithm.reference is None and adapters is not None:
        return InnerReference(policy, adapters=adapters)  # without adapters it is the model that RL starts with
    folder = algorithm.reference or start
    model = load_frozen(
        folder,
        field="algorithm.reference",
        vocab_size=policy.config.vocab_size,
        temperature=temperature,
        device=policy.compute_device,
        on_meta=mesh is not None and mesh.size() > 1,
        attention=policy.attention_choice.kernel,
    )
    model.context = policy.context
    if mesh:
        shard(model, mesh, source=ModelConfig(path=folder), offload=offload)
    return InnerReference(model)


class FrozenModel:
    """A frozen model in a process of its own: the model in `folder`, on the device of `mesh`, which has one rank.

    Trees are cut into rows of at most `max_tokens`; a longer sequence is a row alone. With `offload` its weights
    are in the host's memory between their uses. Raises `ConfigError`, which names the setting `field`, if the
    folder holds no usable model, or its vocabulary does not have the policy's `vocab_size`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        field: str = "algorithm.reference",
        vocab_size: int,
        temperature: float,
        max_tokens: int,
        mesh: DeviceMesh,
        offload: bool = False,
        attention: Attention = Attention.AUTO,
    ) -> None:
        device = torch.device(mesh.device_type)
        self._model = load_frozen(
            folder,
            field=field,
            vocab_size=vocab_size,
            temperature=temperature,
            device=device,
            attention=attention,
        )
        self._max_tokens = max_tokens
        # A model on one rank needs no shards, but FSDP makes it compute in the learner's precision, bf16 on CUDA.
        shard(self._model, mesh, source=ModelConfig(path=folder), offload=offload)

    @property
    def fingerprint(self) -> str:
        """Hash over a sample of its weights."""
        return fingerprint([local_part(parameter) for parameter in self._model.parameters()])

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        """[L] log-probabilities of each response, from one packed forward; 0 for a token that no row predicts.

        If a tree among them exceeds `max_tokens`, each of its parts and each other response take a forward alone.
        """
        parts = [part for trajectory in trajectories for part in cut_tree(trajectory, self._max_tokens)]
        rows = [parts] if len(parts) == len(trajectories) else [[part] for part in parts]
        groups = tuple({trajectory.group_id: None for trajectory in trajectories})
        # Nothing is trained here, so any loss weights will do.
        weights = StepWeights(aggregation=Aggregation.TOKEN_MEAN, num_trajectories=1, num_trained=1, groups=groups)
        found = {item.id: np.zeros(len(item.response_ids), np.float32) for item in trajectories}
        for row in rows:
            values = _logprobs(self._model, microbatch(row, weights))
            for part, placed in zip(row, lay_out(row).placed, strict=True):
                found[part.id][placed.places] = values[placed.rows]
        return list(found.values())


def _logprobs(model: PreTrainedModel, batch: MicroBatch) -> FloatArray:
    """[T] log-probabilities of a microbatch's labels, on the host."""
    with torch.no_grad():
        logprobs: FloatArray = policy_logprobs(model, batch)[0].cpu().numpy()
    return logprobs
