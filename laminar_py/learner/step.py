"""The learner: one optimizer step on packed microbatches. Called by the learner's process in `runtime`.

Invariant: a step depends on its tokens and their loss weights alone, not on how they are split into
microbatches and over ranks (law 5, up to fp32 rounding).
"""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laminar_py.config import LearnerConfig, ModelConfig
from laminar_py.learner.checkpoint import load_checkpoint, save_checkpoint
from laminar_py.learner.export import export_hf, named_tensors
from laminar_py.learner.loss import grpo_loss
from laminar_py.learner.model import load_policy, policy_logprobs, shard
from laminar_py.types import MicroBatch, StepMetrics


class Learner:
    """One data-parallel rank: the policy, its optimizer and the number of steps taken.

    Without a `mesh` it is alone, on a CPU and unsharded; with one, all ranks call every method together.
    """

    def __init__(
        self,
        model: ModelConfig,
        settings: LearnerConfig,
        *,
        temperature: float,
        seed: int,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if settings.importance_cap < 1 + settings.clip_high:
            raise ValueError(
                f"learner.importance_cap={settings.importance_cap} is below 1 + learner.clip_high ="
                f" {1 + settings.clip_high}, so the clip would never act; raise it"
            )
        self._source = model.path
        self._settings = settings
        self._mesh = mesh
        device = torch.device(mesh.device_type if mesh else "cpu")
        self.model = load_policy(model, seed=seed, temperature=temperature, device=device)
        if mesh:
            shard(self.model, mesh)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.num_steps = 0

    def step(self, microbatches: Sequence[MicroBatch]) -> StepMetrics:
        """One optimizer step; the loss weights of all microbatches of all ranks sum to 1.

        Every rank brings the same number of microbatches (one of zero weights where it has no more): gradients
        are reduced with the last, and a rank with fewer would leave the others waiting. Raises
        `FloatingPointError` before anything changes if the gradient is not finite.
        """
        assert microbatches, "a step needs at least one microbatch"
        started = time.perf_counter()
        sums = torch.zeros(5, device=self.model.device)
        for index, batch in enumerate(microbatches):
            self._reduce_gradients(index == len(microbatches) - 1)
            sums += self._accumulate(batch)
        grad_norm = self._update()
        self.num_steps += 1
        loss, entropy, ratio_deviation, clip_fraction, truncated_fraction = self._sum_over_ranks(sums)
        return StepMetrics(
            loss=loss,
            grad_norm=grad_norm,
            entropy=entropy,
            ratio_deviation=ratio_deviation,
            clip_fraction=clip_fraction,
            truncated_fraction=truncated_fraction,
            elapsed_s=time.perf_counter() - started,
        )

    def named_tensors(self, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, one full tensor at a time."""
        return named_tensors(self.model, dtype=dtype)

    def export_hf(self, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
        """The model as a plain Hugging Face folder, which must not exist yet."""
        writes = self._mesh is None or self._mesh.get_rank() == 0
        export_hf(self.model, folder, source=self._source, dtype=dtype, writes=writes)

    def save(self, folder: Path) -> None:
        """Write a checkpoint; a later `load` continues bit-identically."""
        save_checkpoint(folder, model=self.model, optimizer=self._optimizer, step=self.num_steps, mesh=self._mesh)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint. Raises `ValueError` if it is torn."""
        self.num_steps = load_checkpoint(folder, model=self.model, optimizer=self._optimizer, mesh=self._mesh)

    def _accumulate(self, batch: MicroBatch) -> Tensor:
        """Add the gradient of one microbatch; its part of the step's metrics [5]."""
        device = self.model.device
        weights = torch.tensor(batch.loss_weights, device=device)
        logprobs, entropy = policy_logprobs(self.model, batch)
        result = grpo_loss(
            logprobs,
            behaviour_logprobs=torch.tensor(batch.behaviour_logprobs, device=device),
            advantages=torch.tensor(batch.advantages, device=device),
            loss_weights=weights,
            clip_low=self._settings.clip_low,
            clip_high=self._settings.clip_high,
            importance_cap=self._settings.importance_cap,
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        mean_entropy = (weights * entropy.detach()).sum()
        return torch.stack(
            [
                result.loss.detach(),
                mean_entropy,
                result.ratio_deviation,
                result.clip_fraction,
                result.truncated_fraction,
            ]
        )

    def _reduce_gradients(self, last: bool) -> None:
        """Let FSDP reduce gradients over ranks with the last microbatch only."""
        if self._mesh:
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)

    def _update(self) -> float:
        """Clip, step, clear. Returns the gradient norm before clipping."""
        parameters = list(self.model.parameters())
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if not math.isfinite(norm):
            self._optimizer.zero_grad()
            raise FloatingPointError(f"gradient norm {norm} in learner step {self.num_steps + 1}")
        torch.nn.utils.clip_grads_with_norm_(parameters, self._settings.grad_clip, total)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def _sum_over_ranks(self, sums: Tensor) -> list[float]:
        if self._mesh:
            dist.all_reduce(sums, group=self._mesh.get_group())
        values: list[float] = sums.tolist()
        return values
