"""The learner: a step on packed microbatches. Called by the learner's process in `runtime`.

Invariant: an update depends on its tokens and their loss weights alone, not on how they are split into
microbatches and over ranks (law 5, up to fp32 rounding). Which tokens are in which update of a step follows from
that split.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from laminar_py.config.algorithm import AlgorithmConfig, Divergence, Objective, Partition, Proximal
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.lora import LoraConfig
from laminar_py.config.model import ModelConfig
from laminar_py.learner.activations import compile_layers, recompute_activations
from laminar_py.learner.checkpoint import Checkpointer
from laminar_py.learner.export import export_hf, named_tensors
from laminar_py.learner.flops import peak_flops, training_cost
from laminar_py.learner.losses.loss import distilled, policy_loss, proximal_logprobs, regularised
from laminar_py.learner.losses.objectives import Terms, imbalance
from laminar_py.learner.metrics import TokenSums
from laminar_py.learner.model import (
    add_partition,
    load_policy,
    load_reference,
    policy_logprobs,
    policy_outputs,
    shard,
)
from laminar_py.learner.optimizer import Optimizer
from laminar_py.learner.reference import refer
from laminar_py.records.batch import MicroBatch
from laminar_py.records.codec import FloatArray
from laminar_py.records.metrics import StepMetrics, Work

if TYPE_CHECKING:  # peft is an extra, and takes seconds to import
    from laminar_py.learner.lora import Adapters


class Learner:
    """One data-parallel rank: the policy, its optimizer and the number of steps taken.

    Without a `mesh` it is alone, on a CPU and unsharded; with one, all ranks call every method together.
    """

    def __init__(
        self,
        model: ModelConfig,
        settings: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        seed: int,
        num_steps: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """`num_steps` of the whole run, over which the learning rate decays, if it does."""
        self._source = model.path
        self._algorithm = algorithm
        self._mesh = mesh
        self._device = device = torch.device(mesh.device_type if mesh else "cpu")
        self.model = load_policy(model, seed=seed, temperature=temperature, device=device)
        self._adapters = self._adapt(settings.lora, seed)
        self._learns_partition = (
            algorithm.objective is Objective.BALANCE and algorithm.partition is Partition.LEARNED
        )
        if self._learns_partition:
            add_partition(self.model)
        recompute_activations(self.model, settings.recompute)
        if settings.compile:
            compile_layers(self.model)
        if mesh:
            shard(self.model, mesh, offload=settings.offload)
        self._reference: PreTrainedModel | None = None
        # without its adapters a policy is its start, so nothing need be loaded for that
        refers = algorithm.refers and not algorithm.refers_in_stage
        self._refers_to_base = refers and algorithm.reference is None and self._adapters is not None
        if refers and not self._refers_to_base:
            folder, vocab = algorithm.reference or model.path, self.model.config.vocab_size
            self._reference = load_reference(folder, vocab_size=vocab, temperature=temperature, device=device)
            if mesh:
                shard(self._reference, mesh, offload=settings.offload)
        self._cost = training_cost(self.model)
        self._peak_flops = peak_flops(device)
        self._optimizer = Optimizer(self.model, settings, num_steps=num_steps, partition_lr=algorithm.partition_lr)
        adapted = None if self._adapters is None else self._adapters.adapted(mesh)
        self._checkpointer = Checkpointer(self.model, self._optimizer.adamw, mesh=mesh, adapted=adapted)
        self.num_steps = 0

    def step(self, microbatches: Sequence[MicroBatch]) -> StepMetrics:
        """A learner step: `updates_per_step` optimizer steps, each on its own microbatches.

        The loss weights of all microbatches of all ranks sum to 1. Every rank brings equally many (one of zero
        weights where it has no more): gradients are reduced with the last of an update, and a rank with fewer
        would leave the others waiting. An update whose gradient is not finite changes nothing but the count of
        those skipped.
        """
        assert microbatches, "a step needs at least one microbatch"
        started = time.perf_counter()
        microbatches = self._referred(microbatches)
        reference_s = time.perf_counter() - started
        sums = TokenSums(self._device)
        updates = min(self._algorithm.updates_per_step, len(microbatches))
        parts = [microbatches[first::updates] for first in range(updates)]
        shares, before = self._shares(parts), [None, *(self._recompute(part) for part in parts[1:])]
        partition = self._log_partition(microbatches)
        losses: list[float] = []  # of updates that took place
        norms: list[float] = []
        lengths: list[int] = []  # of all sequences
        for part, share, proximal in zip(parts, shares, before, strict=True):
            loss, seen = torch.zeros((), device=self._device), TokenSums(self._device)
            for place, batch in enumerate(part):
                lengths += batch.lengths
                self._reduce_gradients(place == len(part) - 1)
                at_start = None if proximal is None else proximal[place]
                loss += self._accumulate(
                    batch,
                    seen,
                    proximal=at_start,
                    log_partition=partition,
                    scale=1.0 / share,
                    untouched=not norms,
                )
            total, norm = self._over_ranks(float(loss)), self._optimizer.update(self.num_steps)
            if norm is not None:
                losses.append(total)
                norms.append(norm)
                sums.merge(seen)
        self.num_steps += 1
        sums.reduce(self._mesh)
        work = self._work(lengths)  # on CUDA it waits for all before it
        elapsed_s = time.perf_counter() - started
        if not losses:
            return StepMetrics(
                loss=0.0,
                grad_norm=0.0,
                elapsed_s=elapsed_s,
                updates=updates,
                skipped=updates,
                reference_s=reference_s,
                work=work,
            )
        return StepMetrics(
            loss=sum(losses) / len(losses),
            grad_norm=max(norms),
            elapsed_s=elapsed_s,
            tokens=sums.tokens(),
            by_staleness=sums.by_staleness(),
            mismatch=sums.mismatch(),
            updates=updates,
            skipped=updates - len(losses),
            reference_s=reference_s,
            work=work,
        )

    def named_tensors(self, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """What is published, one full tensor at a time: weights by their Hugging Face names, or adapters."""
        if self._adapters is not None:
            return self._adapters.tensors(dtype=dtype)
        return named_tensors(self.model, dtype=dtype)

    def adapter_config(self) -> bytes | None:
        """`adapter_config.json` of what is published, if that is adapters."""
        return None if self._adapters is None else self._adapters.config()

    def export_hf(self, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
        """The model as a plain Hugging Face folder, which must not exist yet."""
        assert self._adapters is None, "adapters are published, not exported"
        writes = self._mesh is None or self._mesh.get_rank() == 0
        export_hf(self.model, folder, source=self._source, dtype=dtype, writes=writes)

    def save(self, folder: Path) -> None:
        """Write a checkpoint; a later `load` continues bit-identically."""
        self.begin_save(folder)
        self.finish_save()

    def begin_save(self, folder: Path) -> None:
        """Begin a checkpoint of the state as it is now; steps may go on at once."""
        self._checkpointer.begin(folder, step=self.num_steps)

    def finish_save(self) -> None:
        """Return when the checkpoint that was begun last is complete on disk. Raises what failed."""
        self._checkpointer.finish()

    def load(self, folder: Path) -> None:
        """Restore a checkpoint. Raises `ValueError` if it is torn or of another model."""
        self.num_steps = self._checkpointer.load(folder)

    def _adapt(self, settings: LoraConfig | None, seed: int) -> "Adapters | None":
        if settings is None:
            return None
        from laminar_py.learner.lora import Adapters

        return Adapters(self.model, settings, base=self._source, seed=seed)

    def _referred(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """With the log-probabilities of the reference, unless there is none here."""
        if self._reference is not None:
            return refer(self._reference, microbatches)
        if self._adapters is None or not self._refers_to_base:
            return microbatches
        with self._adapters.disabled():
            return refer(self.model, microbatches)

    def _accumulate(
        self,
        batch: MicroBatch,
        sums: TokenSums,
        *,
        proximal: Tensor | None = None,
        log_partition: Tensor | None = None,
        scale: float = 1.0,
        untouched: bool = True,
    ) -> Tensor:
        """Add the gradient of one microbatch, `scale` times; its loss (scalar)."""
        logprobs, entropy, partition = policy_outputs(self.model, batch)
        rows = torch.tensor(np.flatnonzero(batch.loss_weights), device=logprobs.device)  # of trained tokens
        staleness = torch.tensor(batch.staleness, device=logprobs.device)[rows]
        terms = self._terms(batch, rows, logprobs[rows], staleness, None if proximal is None else proximal[rows])
        if log_partition is not None:
            terms = replace(terms, log_partition=log_partition[_groups(batch, rows.device)])
        if partition is not None:
            terms = replace(terms, log_partition=partition[_first(terms, rows, length=len(partition))])
        loss = policy_loss(terms, self._algorithm) * scale
        loss.backward()  # type: ignore[no-untyped-call]
        sums.add(terms, entropy=entropy[rows], staleness=staleness, settings=self._algorithm, untouched=untouched)
        return loss.detach()

    def _terms(
        self, batch: MicroBatch, rows: Tensor, logprobs: Tensor, staleness: Tensor, recomputed: Tensor | None
    ) -> Terms:
        """What the loss is made of, at these rows of the microbatch."""

        def at_rows(values: FloatArray) -> Tensor:
            return torch.tensor(values, device=rows.device)[rows]

        behaviour, advantages = at_rows(batch.behaviour_logprobs), at_rows(batch.advantages)
        if batch.teacher_logprobs is not None:
            teacher = at_rows(batch.teacher_logprobs)
            advantages = distilled(advantages, logprobs, teacher, coef=self._algorithm.teacher_coef)
        assert batch.reference_logprobs is not None or not self._algorithm.refers, "the reference was not asked"
        reference = None if batch.reference_logprobs is None else at_rows(batch.reference_logprobs)
        if reference is not None and self._algorithm.kl_coef > 0 and self._algorithm.kl_estimator is Divergence.K1:
            advantages = regularised(advantages, logprobs, reference, coef=self._algorithm.kl_coef)
        proximal = proximal_logprobs(
            self._algorithm.proximal, logprobs, behaviour=behaviour, staleness=staleness, recomputed=recomputed
        )
        ends = torch.tensor(batch.cu_seqlens[1:], device=rows.device)
        sequence = torch.bucketize(rows, ends, right=True)
        return Terms(
            logprobs=logprobs,
            behaviour=behaviour,
            proximal=proximal,
            advantages=advantages,
            weights=at_rows(batch.loss_weights),
            sequence=sequence,
            num_sequences=len(batch.lengths),
            reference=reference,
            rewards=None if batch.rewards is None else torch.tensor(batch.rewards, device=rows.device),
        )

    def _log_partition(self, microbatches: Sequence[MicroBatch]) -> Tensor | None:
        """Estimate for each group of the step by the policy at its start, [G], if the algorithm asks for it."""
        if self._algorithm.objective is not Objective.BALANCE or self._learns_partition:
            return None
        count = 1 + max(int(batch.groups.max()) for batch in microbatches if batch.groups is not None)
        device = self._device
        sums = torch.zeros(2, int(self._over_ranks(count, dist.ReduceOp.MAX)), device=device)
        for batch in microbatches:
            with torch.no_grad():
                logprobs, _ = policy_logprobs(self.model, batch)
            rows = torch.tensor(np.flatnonzero(batch.loss_weights), device=device)
            staleness = torch.zeros_like(rows)
            terms = self._terms(batch, rows, logprobs[rows], staleness, logprobs[rows])
            counts = (terms.sequence_sum(torch.ones_like(terms.weights)) > 0).to(sums.dtype)
            found = torch.stack([imbalance(terms, self._algorithm) * counts, counts])
            sums.index_add_(1, _groups(batch, device), found)
        if self._mesh:
            dist.all_reduce(sums, group=self._mesh.get_group())
        return -sums[0] / sums[1].clamp(min=1)

    def _shares(self, parts: Sequence[Sequence[MicroBatch]]) -> list[float]:
        """Of the loss weights of the step, those of all ranks together, what each part has."""
        if len(parts) == 1:
            return [1.0]
        weights = [self._over_ranks(sum(float(batch.loss_weights.sum()) for batch in part)) for part in parts]
        return [weight / (sum(weights) or 1.0) or 1.0 for weight in weights]

    def _recompute(self, microbatches: Sequence[MicroBatch]) -> list[Tensor] | None:
        """Log-probabilities before the first update, if the algorithm compares with them and there are more."""
        if self._algorithm.proximal is not Proximal.RECOMPUTE or self._algorithm.updates_per_step == 1:
            return None
        with torch.no_grad():
            return [policy_logprobs(self.model, batch)[0] for batch in microbatches]

    def _reduce_gradients(self, last: bool) -> None:
        """Let FSDP reduce gradients over ranks with the last microbatch only."""
        if self._mesh:
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)

    def _work(self, lengths: Sequence[int]) -> Work:
        """What all ranks computed, given this one's sequences."""
        num_ranks = self._mesh.size() if self._mesh else 1
        return Work(
            int(self._over_ranks(sum(lengths))),
            self._over_ranks(self._cost.flops(lengths)),
            None if self._peak_flops is None else self._peak_flops * num_ranks,
        )

    def _over_ranks(self, value: float, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> float:
        """Its sum, or what else is asked for."""
        if not self._mesh:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, op=how, group=self._mesh.get_group())
        return float(total)


def _groups(batch: MicroBatch, device: torch.device) -> Tensor:
    assert batch.groups is not None, "the packer names groups where the algorithm compares their members"
    return torch.tensor(batch.groups, device=device)


def _first(terms: Terms, rows: Tensor, *, length: int) -> Tensor:
    """Where each sequence's first trained token is predicted, [S]: at its prompt's end; the last if none is."""
    first = torch.full((terms.num_sequences,), length - 1, device=rows.device)
    return first.scatter_reduce(0, terms.sequence, rows, "amin")
