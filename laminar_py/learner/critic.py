"""The critic of PPO: a value model beside the policy on each rank, with its own optimizer. `step` owns it.

At the start of a step `assess` computes the value of each state before a trained token, and from these advantages
and targets, which then stay as they are. So updates of policy and critic in the step do not depend on each other.
Advantages are normalised over the trained tokens of all ranks, each token counted once. A response lies whole in
one microbatch, so no rank needs the values of another (`tests/learner/test_critic.py`).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from laminar_py.config.critic import CriticConfig
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.learner.checkpoint import Trained
from laminar_py.learner.distributed import COMPUTES_S, Ranks
from laminar_py.learner.layers import free_heap
from laminar_py.learner.losses.loss import trained_rows
from laminar_py.learner.losses.value import Numbers, estimate_advantages, value_loss
from laminar_py.learner.metrics import training_cost
from laminar_py.learner.model import state_values
from laminar_py.learner.moves import CriticProver
from laminar_py.learner.optimizer import Optimizer
from laminar_py.learner.packing.packer import STD_FLOOR
from laminar_py.learner.trained import open_model, set_gradient_sync
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.columns import ACTORS, PLACES, VALUE_TARGETS, VALUES
from laminar_py.records.credit import MOST_ROLES
from laminar_py.records.metrics import CriticFigures
from laminar_py.records.trajectory import MicroBatch


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Of the N trained tokens of a microbatch."""

    rows: IntArray  # [N]
    values: Numbers  # [N]
    advantages: Numbers  # [N]
    targets: Numbers  # [N]


class Critic:
    """The value model in `source`, of this rank; every method is a collective."""

    def __init__(
        self,
        source: ModelConfig,
        settings: LearnerConfig,
        critic: CriticConfig,
        ranks: Ranks,
        *,
        seed: int,
        total_steps: int | None,
    ) -> None:
        self._critic = critic
        self._ranks = ranks
        self._settings = critic.optimizer(settings)
        self.model, _ = open_model(source, settings, ranks, seed=seed, is_critic=True)
        self.optimizer = Optimizer(self.model, self._settings, total_steps=total_steps)
        self.trained = Trained(self.model, self.optimizer.adamw)
        self.prover = CriticProver(self.model, ranks, self._settings)
        self.cost = training_cost(self.model)
        self._begin()

    def _begin(self) -> None:
        """Begin the figures of a step."""
        self.prover.begin()
        self._elapsed_s = 0.0
        # tokens, tokens without a finite value; sums of values, targets, targets^2, errors, errors^2
        self._assessed = np.zeros(7)
        self._weights = self._no_weights()  # of updates that were not skipped
        self._losses: list[float] = []  # of updates that were not skipped
        self._norms: list[float] = []
        self._skipped = 0

    def _no_weights(self) -> Tensor:
        """[2] sums of loss weights, and of clipped ones."""
        return torch.zeros(2, dtype=torch.float64, device=self._ranks.device)

    # ---- values

    def assess(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return copies of a step's microbatches with advantages in place of returns, and the critic's columns."""
        started = time.perf_counter()
        self._begin()
        found = [self._estimate(batch) for batch in batches]
        if self._ranks.mesh:
            self.model.reshard()  # without a backward pass FSDP keeps the root's own parameters whole
        mean, scale = self._normalisation(found)
        completed = [_complete(batch, one, mean, scale) for batch, one in zip(batches, found, strict=True)]
        self._elapsed_s += time.perf_counter() - started
        return completed

    def _estimate(self, batch: MicroBatch) -> _Estimate:
        """Compute values of a microbatch, and what follows from them."""
        self._ranks.begin("values of the critic", limit_s=COMPUTES_S)
        rows = np.flatnonzero(batch.loss_weights).astype(np.int32)
        with torch.no_grad():
            found = state_values(self.model, batch, torch.tensor(rows, device=self._ranks.device).long())
        values = found.double().cpu().numpy()
        segments = np.searchsorted(batch.cu_seqlens, rows, side="right") - 1
        advantages, targets = estimate_advantages(
            values,
            batch.advantages[rows].astype(np.float64),
            chains=batch.responses[segments].astype(np.int64) * MOST_ROLES + batch.columns[ACTORS][rows],
            places=batch.columns[PLACES][rows],
            settings=self._critic,
        )
        if self._ranks.counts:
            errors = targets - values
            sums = values.sum(), targets.sum(), (targets**2).sum(), errors.sum(), (errors**2).sum()
            self._assessed += (len(rows), (~np.isfinite(values)).sum(), *sums)
        return _Estimate(rows, values, advantages, targets)

    def _normalisation(self, found: Sequence[_Estimate]) -> tuple[float, float]:
        """Return the mean of the step's advantages over all ranks, and 1 over their deviation."""
        own = np.concatenate([one.advantages for one in found]) if self._ranks.counts else np.zeros(0)
        mean = self._mean(own)
        deviation = math.sqrt(self._mean((own - mean) ** 2))
        return mean, 1.0 / (deviation + STD_FLOOR)

    def _mean(self, values: Numbers) -> float:
        """Mean of the `values` of all ranks; 0 without any."""
        return self._ranks.sum(float(values.sum())) / max(1.0, self._ranks.sum(len(values)))

    # ---- updates

    def update(self, batches: Sequence[MicroBatch], *, share: float, step: int) -> None:
        """Make an optimizer step on assessed microbatches, which have this `share` of the step's loss weights.

        `step` counts learner steps from 0. An update whose loss or gradient is not finite changes no weight.
        """
        started = time.perf_counter()
        loss, count = torch.zeros((), device=self._ranks.device), len(batches)
        self._of_update = self._no_weights()
        for place, batch in enumerate(batches):
            self._ranks.begin(f"critic's microbatch {place + 1} of {count} of step {step + 1}", limit_s=COMPUTES_S)
            set_gradient_sync(self.model, self._ranks, self._settings, last=place == count - 1)
            loss += self._backward(batch, share)
        self._ranks.begin(f"update of the critic in step {step + 1}", limit_s=COMPUTES_S)
        total = self._ranks.sum(float(loss))
        self.prover.check_gradients()
        self.prover.mark(self.optimizer.adamw)
        norm = self.optimizer.update(step, loss=total)
        if norm is None:
            self._skipped += 1
        else:
            self.prover.check_moved(lr=self.optimizer.lr, norm=norm, updates=self.optimizer.updates)
            self._weights += self._of_update
            self._losses.append(total)
            self._norms.append(norm)
        self._elapsed_s += time.perf_counter() - started

    def _backward(self, batch: MicroBatch, share: float) -> Tensor:
        """Add a microbatch's gradients; return its loss, 0 on a rank that does not count."""
        rows = trained_rows(batch, self._ranks.device)
        values = state_values(self.model, batch, rows)
        at_start, targets, weights = (
            torch.tensor(numbers, device=rows.device)[rows]
            for numbers in (batch.columns[VALUES], batch.columns[VALUE_TARGETS], batch.loss_weights)
        )
        loss, is_clipped = value_loss(
            values, at_start=at_start, targets=targets, weights=weights / share, clip=self._critic.clip
        )
        values.retain_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self._ranks.device.type == "cpu":
            free_heap()
        if not self._ranks.counts:
            return torch.zeros_like(loss)
        self.prover.add(values)
        self._of_update += torch.stack([weights.sum(), (weights * is_clipped).sum()])
        return loss.detach()

    def finish(self) -> CriticFigures:
        """Return the figures of the step, over all ranks."""
        sums = torch.tensor(self._assessed, dtype=torch.float64, device=self._ranks.device)
        self._ranks.reduce_tensor(sums)
        self._ranks.reduce_tensor(self._weights)
        tokens, not_finite, values, targets, target_squares, errors, error_squares = sums.tolist()
        weight, clipped = self._weights.tolist()
        trains = tokens > 0 and self._losses
        spread = target_squares - targets * targets / max(1.0, tokens)
        left = error_squares - errors * errors / max(1.0, tokens)
        return CriticFigures(
            value_loss=sum(self._losses) / len(self._losses) if trains else math.nan,
            value_mean=values / tokens if tokens else math.nan,
            target_mean=targets / tokens if tokens else math.nan,
            explained_variance=1.0 - left / spread if spread > tokens * STD_FLOOR**2 else math.nan,
            clip_fraction=clipped / weight if weight else math.nan,
            grad_norm=max(self._norms) if trains else math.nan,
            learning_rate=self.optimizer.lr if trains else math.nan,
            skipped=self._skipped,
            not_finite=int(not_finite),
            elapsed_s=self._elapsed_s,
        )


def open_critic(
    critic: CriticConfig | None,
    source: ModelConfig,
    settings: LearnerConfig,
    ranks: Ranks,
    *,
    seed: int,
    total_steps: int | None,
) -> Critic | None:
    """Load the value model in `source` and shard it; None for an algorithm without a critic."""
    return None if critic is None else Critic(source, settings, critic, ranks, seed=seed, total_steps=total_steps)


def _complete(batch: MicroBatch, found: _Estimate, mean: float, scale: float) -> MicroBatch:
    """Return a copy of a microbatch with the critic's numbers at its trained rows."""
    columns = {
        VALUES: _at_rows(found.values, found.rows, batch.num_tokens),
        VALUE_TARGETS: _at_rows(found.targets, found.rows, batch.num_tokens),
    }
    advantages = _at_rows((found.advantages - mean) * scale, found.rows, batch.num_tokens)
    return msgspec.structs.replace(batch, advantages=advantages, columns=batch.columns | columns)


def _at_rows(numbers: Numbers, rows: IntArray, length: int) -> FloatArray:
    """[length] numbers at `rows`, 0 elsewhere."""
    out = np.zeros(length, np.float32)
    out[rows] = numbers
    return out
