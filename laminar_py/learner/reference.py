"""The reference model: a frozen policy whose log-probabilities the loss compares with.

`step` adds them to its microbatches, or `workers.processes.learner` computes them for trajectories in a
process of its own. Both run the same forward at the same temperature over the same part of the vocabulary, so a
token gets the same number (`tests/learner/test_reference.py`). A step runs the reference once for each microbatch.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from laminar_py.config.algorithm import Aggregation, AlgorithmConfig
from laminar_py.config.data import ModelConfig
from laminar_py.learner.model import load_reference, policy_logprobs
from laminar_py.learner.packing.packer import PlacedResponse, StepWeights, lay_out, microbatch
from laminar_py.learner.sharding import shard
from laminar_py.records.codec import FloatArray
from laminar_py.records.columns import REFERENCE_LOGPROBS
from laminar_py.records.trajectory import MicroBatch, Trajectory

if TYPE_CHECKING:  # peft is an extra, and takes seconds to import
    from laminar_py.learner.lora import LoraAdapters


class InnerReference:
    """A reference inside the learner: a model of its own, or the policy without its `adapters`."""

    def __init__(self, model: PreTrainedModel, *, adapters: "LoraAdapters | None" = None) -> None:
        self.model = model
        self._adapters = adapters

    def add_logprobs(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the microbatches of a step with the reference's log-probabilities as a column."""
        with nullcontext() if self._adapters is None else self._adapters.disabled():
            columns = [batch.columns | {REFERENCE_LOGPROBS: _logprobs(self.model, batch)} for batch in batches]
        return [
            msgspec.structs.replace(batch, columns=of_batch)
            for batch, of_batch in zip(batches, columns, strict=True)
        ]


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
    """Load the reference that runs inside the learner; None if the algorithm has none, or runs it as a stage.

    `start` is the folder of the model that RL starts with, which is the reference if the config names no other.
    """
    if not algorithm.has_reference or algorithm.reference_in_own_process:
        return None
    if (
        algorithm.reference is None and adapters is not None
    ):  # without its adapters the policy is the model that RL started with
        return InnerReference(policy, adapters=adapters)
    folder = algorithm.reference or start
    model = load_reference(
        folder,
        vocab_size=policy.config.vocab_size,
        temperature=temperature,
        device=policy.compute_device,
        on_meta=mesh is not None and mesh.size() > 1,
    )
    if mesh:
        shard(model, mesh, source=ModelConfig(path=folder), offload=offload)
    return InnerReference(model)


class ReferenceModel:
    """The reference as a stage of its own: the model in `folder`, on the device of `mesh`, which has one rank.

    With `offload` its weights are in the host's memory between their uses. Raises `ConfigError` like
    `load_reference`.
    """

    def __init__(
        self, folder: Path, *, vocab_size: int, temperature: float, mesh: DeviceMesh, offload: bool = False
    ) -> None:
        device = torch.device(mesh.device_type)
        self._model = load_reference(folder, vocab_size=vocab_size, temperature=temperature, device=device)
        # To compute in the learner's precision, which on CUDA is bf16.
        shard(self._model, mesh, source=ModelConfig(path=folder), offload=offload)

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        """Log-probabilities [L] of each trajectory's response tokens, from one packed forward."""
        groups = tuple({trajectory.group_id: None for trajectory in trajectories})
        # Nothing is trained here, so any loss weights will do.
        terms = StepWeights(aggregation=Aggregation.TOKEN_MEAN, num_trajectories=1, num_trained=1, groups=groups)
        values = _logprobs(self._model, microbatch(list(trajectories), terms))
        layout = lay_out(trajectories)
        return [
            _of_response(values, trajectory, placed)
            for trajectory, placed in zip(trajectories, layout.placed, strict=True)
        ]


def _of_response(values: FloatArray, trajectory: Trajectory, placed: PlacedResponse) -> FloatArray:
    """[L] values of a response's tokens, out of those [T] of all rows; 0 for a token that no row predicts."""
    of_response = np.zeros(len(trajectory.response_ids), np.float32)
    of_response[placed.places] = values[placed.rows]
    return of_response


def _logprobs(reference: PreTrainedModel, batch: MicroBatch) -> FloatArray:
    with torch.no_grad():
        logprobs: FloatArray = policy_logprobs(reference, batch)[0].cpu().numpy()
    return logprobs
