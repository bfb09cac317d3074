"""The learner: a step on packed microbatches. Called by `workers.processes.learner`.

Invariant: an update depends on its tokens and their loss weights alone, not on how they are split into
microbatches and over ranks (law 5, up to fp32 rounding). Which tokens are in which update of a step follows from
that split.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from laminar_py.config.algorithm import AlgorithmConfig, Proximal
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import Accumulate, LearnerConfig, LoraConfig
from laminar_py.learner.activations import compile_layers, recompute_activations
from laminar_py.learner.checkpoint import Checkpointer
from laminar_py.learner.export import export_hf, named_tensors
from laminar_py.learner.flops import peak_flops, training_cost
from laminar_py.learner.losses.loss import policy_loss
from laminar_py.learner.metrics import TokenSums
from laminar_py.learner.model import load_policy, policy_logprobs
from laminar_py.learner.optimizer import Optimizer
from laminar_py.learner.ranks import Ranks
from laminar_py.learner.reference import open_reference
from laminar_py.learner.sharding import shard
from laminar_py.learner.terms import estimate_partition, make_terms, trained_rows
from laminar_py.records.batch import MicroBatch
from laminar_py.records.metrics import StepMetrics, TokenMetrics, Work

if TYPE_CHECKING:  # peft is an extra, and takes seconds to import
    from laminar_py.learner.lora import LoraAdapters


def keeps_whole(settings: LearnerConfig, ranks: Ranks) -> bool:
    """True where a rank keeps unsharded gradients between microbatches: asked for, or its shard is all."""
    return settings.accumulate is Accumulate.WHOLE or (ranks.num == 1 and not settings.offload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An optimizer step of a learner step, e.g. `Update(batches=batches[1::4], share=0.25, at_start=None)`."""

    batches: Sequence[MicroBatch]
    share: float  # of the step's loss weights, all ranks together
    at_start: Sequence[Tensor] | None  # [N] log-probabilities of its trained tokens, where the loss needs them


class Learner:
    """A data-parallel rank: the policy, its optimizer and the number of steps taken.

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
        self._ranks = Ranks(mesh)
        self._keeps_whole = keeps_whole(settings, self._ranks)
        device, on_meta = self._ranks.device, self._ranks.num > 1
        self.model = load_policy(model, seed=seed, temperature=temperature, device=device, on_meta=on_meta)
        self._adapters = self._adapt(settings.lora, seed)
        recompute_activations(self.model, settings.recompute)
        if settings.compile:
            compile_layers(self.model)
        if mesh:
            shard(self.model, mesh, source=model, seed=seed, offload=settings.offload)
        self._reference = open_reference(
            self.model,
            algorithm,
            start=model.path,
            adapters=self._adapters,
            temperature=temperature,
            mesh=mesh,
            offload=settings.offload,
        )
        self._cost = training_cost(self.model)
        self._optimizer = Optimizer(self.model, settings, num_steps=num_steps)
        adapted = None if self._adapters is None else self._adapters.adapted(mesh)
        self._checkpointer = Checkpointer(self.model, self._optimizer.adamw, mesh=mesh, adapted=adapted)
        self.num_steps = 0

    def _adapt(self, settings: LoraConfig | None, seed: int) -> "LoraAdapters | None":
        if settings is None:
            return None
        from laminar_py.learner.lora import LoraAdapters

        return LoraAdapters(self.model, settings, base=self._source, seed=seed)

    def step(self, microbatches: Sequence[MicroBatch]) -> StepMetrics:
        """A learner step: `updates_per_step` optimizer steps, each on its own microbatches.

        The loss weights of all microbatches of all ranks sum to 1, or less (`packing.packer`). Every rank brings
        equally many (one of zero weights where it has no more): each takes part in collectives, and a rank with
        fewer would leave the others waiting. An update whose loss or gradient is not finite changes nothing but
        the count of those skipped.
        """
        assert microbatches, "a step needs at least one microbatch"
        started = time.perf_counter()
        if self._reference is not None:
            microbatches = self._reference.refer(microbatches)
        reference_s = time.perf_counter() - started
        updates = self._split(microbatches)
        partition = estimate_partition(self.model, microbatches, self._algorithm, self._ranks)
        sums = TokenSums(self._ranks.device)
        losses: list[float] = []  # of updates that took place
        norms: list[float] = []
        lengths: list[int] = []  # of all sequences
        for update in updates:
            seen = TokenSums(self._ranks.device)
            loss = self._backward(update, seen, partition, lengths, untouched=not norms)
            total = self._ranks.total(float(loss))
            norm = self._optimizer.update(self.num_steps, loss=total)
            if norm is not None:
                losses.append(total)
                norms.append(norm)
                sums.merge(seen)
        self.num_steps += 1
        sums.reduce(self._ranks)
        work = self._work(lengths)  # on CUDA it waits for all before it
        return StepMetrics(
            loss=sum(losses) / len(losses) if losses else 0.0,
            grad_norm=max(norms, default=0.0),
            elapsed_s=time.perf_counter() - started,
            tokens=sums.tokens() if losses else TokenMetrics(),
            by_staleness=sums.by_staleness(),
            mismatch=sums.mismatch(),
            updates=len(updates),
            skipped=len(updates) - len(losses),
            reference_s=reference_s,
            work=work,
        )

    def named_tensors(self, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Tensors to publish, one in full at a time: weights by their Hugging Face names, or adapters."""
        if self._adapters is not None:
            return self._adapters.tensors(dtype=dtype)
        return named_tensors(self.model, dtype=dtype)

    def adapter_config(self) -> bytes | None:
        """`adapter_config.json` of what is published, if that is adapters."""
        return None if self._adapters is None else self._adapters.config()

    def export_hf(self, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
        """Write the model as a plain Hugging Face folder, which must not exist yet."""
        assert self._adapters is None, "adapters are published, not exported"
        export_hf(self.model, folder, source=self._source, dtype=dtype, writes=self._ranks.leads)

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
        """Restore a checkpoint. Raises `ConfigError` if it is torn or of another model."""
        self.num_steps = self._checkpointer.load(folder)

    # ---- what a step consists of

    def _split(self, microbatches: Sequence[MicroBatch]) -> list[Update]:
        """The updates of a step; the first needs no log-probabilities of its start, which are its own."""
        count = min(self._algorithm.updates_per_step, len(microbatches))
        dealt = [microbatches[first::count] for first in range(count)]
        shares = self._shares(dealt)
        at_start = [None, *(self._recompute(batches) for batches in dealt[1:])]
        return [
            Update(batches=batches, share=share, at_start=before)
            for batches, share, before in zip(dealt, shares, at_start, strict=True)
        ]

    def _shares(self, dealt: Sequence[Sequence[MicroBatch]]) -> list[float]:
        """Share of each update in the loss weights of the step, those of all ranks together."""
        if len(dealt) == 1:
            return [1.0]
        weights = [
            self._ranks.total(sum(float(batch.loss_weights.sum()) for batch in batches)) for batches in dealt
        ]
        return [weight / (sum(weights) or 1.0) or 1.0 for weight in weights]

    def _recompute(self, microbatches: Sequence[MicroBatch]) -> list[Tensor] | None:
        """Log-probabilities before the first update, if the algorithm compares with them."""
        if self._algorithm.proximal is not Proximal.RECOMPUTE:
            return None
        with torch.no_grad():
            return [
                policy_logprobs(self.model, batch, trained_rows(batch, self._ranks.device))[0]
                for batch in microbatches
            ]

    def _backward(
        self, update: Update, seen: TokenSums, partition: Tensor | None, lengths: list[int], *, untouched: bool
    ) -> Tensor:
        """Add the gradients of an update, count its tokens and sequences; its loss (scalar)."""
        loss = torch.zeros((), device=self._ranks.device)
        for place, batch in enumerate(update.batches):
            lengths += batch.lengths
            self._reduce_gradients(last=place == len(update.batches) - 1)
            rows = trained_rows(batch, self._ranks.device)
            logprobs, entropy = policy_logprobs(self.model, batch, rows)
            before = None if update.at_start is None else update.at_start[place]
            terms = make_terms(batch, rows, logprobs, self._algorithm, recomputed=before, log_partition=partition)
            own = policy_loss(terms, self._algorithm) * (1.0 / update.share)
            own.backward()  # type: ignore[no-untyped-call]
            seen.add(terms, entropy=entropy, settings=self._algorithm, untouched=untouched)
            loss += own.detach()
        return loss

    def _reduce_gradients(self, *, last: bool) -> None:
        """Have FSDP add the next gradients to the shards, or keep them whole until the last microbatch."""
        if self._ranks.mesh:
            self.model.set_requires_gradient_sync(last or not self._keeps_whole)
            self.model.set_is_last_backward(last or not self._keeps_whole)

    def _work(self, lengths: Sequence[int]) -> Work:
        """Tokens and FLOPs of all ranks, given this one's sequences."""
        peak = peak_flops(self._ranks.device)
        return Work(
            int(self._ranks.total(sum(lengths))),
            self._ranks.total(self._cost.flops(lengths)),
            None if peak is None else peak * self._ranks.num,
        )
