"""The reference model: a policy that stays as it is, asked for its log-probabilities of what another one drew.

`step` has it complete its microbatches; `runtime.reference_part` runs it in a process of its own, on trajectories.
Invariant: either way it is the same forward at the same temperature and over the same part of the vocabulary, so
a token gets the same number; a step never asks for it twice.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import overload

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from laminar_py.config.algorithm import Aggregation
from laminar_py.learner.model import load_reference, policy_logprobs, shard
from laminar_py.packing.packer import StepTerms, microbatch
from laminar_py.records.batch import MicroBatch
from laminar_py.records.codec import FloatArray
from laminar_py.records.trajectory import Trajectory

UNWEIGHED = StepTerms(
    aggregation=Aggregation.TOKEN_MEAN, num_trajectories=1, num_trained=1
)  # nothing is trained, so what tokens count is of no matter


class Referred(Sequence[MicroBatch]):
    """Microbatches that are written when they are asked for, each with its log-probabilities [T]."""

    def __init__(self, batches: Sequence[MicroBatch], logprobs: Sequence[FloatArray]) -> None:
        self._batches = batches
        self._logprobs = logprobs

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> "Referred": ...
    def __getitem__(self, index: int | slice) -> "MicroBatch | Referred":
        if isinstance(index, slice):
            return Referred(self._batches[index], self._logprobs[index])
        return msgspec.structs.replace(self._batches[index], reference_logprobs=self._logprobs[index])


def refer(reference: PreTrainedModel, batches: Sequence[MicroBatch]) -> Referred:
    """The microbatches of a step with the log-probabilities of `reference`, which is asked once for each."""
    return Referred(batches, [_logprobs(reference, batch) for batch in batches])


class ReferenceModel:
    """The reference alone: the model in `folder`, on the device that `mesh`, of one rank, is of.

    With `offload` its weights are in the host's memory between their uses. Raises `ValueError` as `load_reference`
    does.
    """

    def __init__(
        self, folder: Path, *, vocab_size: int, temperature: float, mesh: DeviceMesh, offload: bool = False
    ) -> None:
        device = torch.device(mesh.device_type)
        self._model = load_reference(folder, vocab_size=vocab_size, temperature=temperature, device=device)
        # For the learner's precision, which on CUDA is not that of the weights.
        shard(self._model, mesh, offload=offload)

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        """[L] of each one's response tokens, from one packed forward."""
        values = _logprobs(self._model, microbatch(list(trajectories), UNWEIGHED))
        found, end = [], 0
        for trajectory in trajectories:
            end += trajectory.num_tokens
            found.append(values[end - 1 - len(trajectory.response_ids) : end - 1])
        return found


def _logprobs(reference: PreTrainedModel, batch: MicroBatch) -> FloatArray:
    with torch.no_grad():
        logprobs: FloatArray = policy_logprobs(reference, batch)[0].cpu().numpy()
    return logprobs
