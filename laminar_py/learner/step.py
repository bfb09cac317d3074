"""The learner: optimizer steps on packed microbatches. `workers.processes.learner` owns a `Learner` on each rank.

An update depends only on its tokens and their loss weights, not on their split into microbatches and over ranks
(law 5, up to fp32 rounding). If a step has several updates, the split decides which update a token is in. The
learning rate depends on the number of steps alone, so a resumed run needs no scheduler state. An update whose
loss or gradient is not finite changes nothing (`tests/learner/test_optimizer.py`).
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from laminar_py.config.algorithm import AlgorithmConfig, Proximal
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.learner.checkpoint import Checkpointer, Trained
from laminar_py.learner.critic import open_critic
from laminar_py.learner.distributed import COMPUTES_S, Ranks
from laminar_py.learner.export import WeightExporter, full_tensors
from laminar_py.learner.layers import free_heap
from laminar_py.learner.losses.loss import estimate_partition, make_loss_inputs, policy_loss, trained_rows
from laminar_py.learner.metrics import TokenSums, peak_flops, training_cost
from laminar_py.learner.model import next_logprobs, policy_logprobs
from laminar_py.learner.optimizer import Optimizer
from laminar_py.learner.proof import StepProver, next_tokens, probe_batch
from laminar_py.learner.reference import open_reference
from laminar_py.learner.rounding import Rounding
from laminar_py.learner.trained import open_model, set_gradient_sync
from laminar_py.records.codec import IntArray
from laminar_py.records.metrics import StepMetrics, Work
from laminar_py.records.proofs import NextToken
from laminar_py.records.trajectory import MicroBatch
from laminar_py.records.weights import TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Input of one optimizer step, e.g. `Update(batches=batches[1::4], share=0.25, at_start=None)`."""

    batches: Sequence[MicroBatch]  # of this rank
    share: float  # share of the learner step's loss weights that this update has, over all ranks
    # by batch: [N] log-probabilities of its trained tokens at the start of the learner step; None: not needed
    at_start: Sequence[Tensor] | None


class Learner:
    """One data-parallel rank: the policy, its optimizer, maybe a critic, and the number of steps taken.

    Without a `mesh` the rank is alone, on a CPU, and the policy is unsharded. With a mesh every method is a
    collective, so all ranks must call it.
    """

    def __init__(
        self,
        model: ModelConfig,
        settings: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        seed: int,
        total_steps: int | None = None,
        mesh: DeviceMesh | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        """`total_steps` of the whole run is for a decay of the rate, `rounding` for the policy's forward."""
        self._algorithm, self._settings = algorithm, settings
        self.ranks = Ranks(mesh, context_parallel=settings.context_parallel)  # with the position of this rank
        self.model, self._adapters = open_model(
            model, settings, self.ranks, seed=seed, temperature=temperature, rounding=rounding
        )
        self._reference = open_reference(
            self.model,
            algorithm,
            start=model.path,
            adapters=self._adapters,
            temperature=temperature,
            mesh=mesh,
            offload=settings.offload,
        )
        self.cost = training_cost(self.model)
        self._optimizer = Optimizer(self.model, settings, total_steps=total_steps)
        self._critic = open_critic(
            algorithm.critic, model, settings, self.ranks, seed=seed, total_steps=total_steps
        )
        fingerprint = None if self._adapters is None else self._adapters.fingerprint(mesh)
        policy = Trained(self.model, self._optimizer.adamw)
        valued, watch = (None, None) if self._critic is None else (self._critic.trained, self._critic.prover)
        self._checkpointer = Checkpointer(policy, mesh=mesh, adapters=fingerprint, critic=valued)
        self._exporter = WeightExporter(self.model)
        self._prover = StepProver(self.model, self.ranks, self._reference, settings, algorithm, critic=watch)
        self.steps_taken = 0

    def step(self, microbatches: Sequence[MicroBatch]) -> StepMetrics:
        """Make `updates_per_step` optimizer steps, each on its own microbatches; returns metrics over all of them.

        The loss weights of all microbatches on all ranks sum to 1 or less (`packing.packer`). Every rank must pass
        equally many microbatches, if need be with zero weight: a rank with fewer would leave other ranks waiting
        in a collective. An update whose loss or gradient is not finite changes no weight and counts as skipped.
        """
        assert microbatches, "a step needs at least one microbatch"
        started = time.perf_counter()
        microbatches, reference_s = self._completed(microbatches)
        self._prover.begin()
        updates = self._split_updates(microbatches)
        partition = estimate_partition(self.model, microbatches, self._algorithm, self.ranks)
        sums = TokenSums(self.ranks.device)
        losses: list[float] = []  # of updates that were not skipped
        norms: list[float] = []
        for update in updates:
            of_update = TokenSums(self.ranks.device)
            loss = self.ranks.sum(float(self._backward(update, of_update, partition, at_step_start=not norms)))
            self._prover.check_gradients()
            self._prover.mark(self._optimizer.adamw)
            norm = self._optimizer.update(self.steps_taken, loss=loss)
            if norm is not None:
                self._prover.check_moved(lr=self._optimizer.lr, norm=norm, updates=self._optimizer.updates)
                losses.append(loss)
                norms.append(norm)
                sums.merge(of_update)
            self._prover.end_update()
            if self._critic is not None:
                self._critic.update(update.batches, share=update.share, step=self.steps_taken)
        self.steps_taken += 1
        sums.reduce(self.ranks)
        tokens = sums.tokens()
        trains = tokens.num_tokens > 0  # else no token had a weight, or all updates were skipped
        work = self._measure_work(microbatches)  # on CUDA this waits for all kernels of the step
        return StepMetrics(
            loss=sum(losses) / len(losses) if trains else math.nan,
            grad_norm=max(norms) if trains else math.nan,
            learning_rate=self._optimizer.lr if trains else math.nan,
            elapsed_s=time.perf_counter() - started,
            tokens=tokens,
            by_staleness=sums.by_staleness(),
            mismatch=sums.mismatch(),
            updates=len(updates),
            skipped=len(updates) - len(losses),
            reference_s=reference_s,
            work=work,
            critic=None if self._critic is None else self._critic.finish(),
            proof=self._prover.finish(),
        )

    def probe(self, prompts: Sequence[IntArray]) -> list[NextToken]:
        """Return the present distribution of the token after each prompt."""
        self.ranks.begin("probes", limit_s=COMPUTES_S)
        found = next_tokens(next_logprobs(self.model, probe_batch(prompts)))
        if self.ranks.mesh:
            self.model.reshard()  # without a backward pass FSDP keeps the root's own parameters whole
        return found

    def sources(self, *, dtype: torch.dtype, gather: bool) -> list[TensorSource]:
        """Return the sources of a version: adapters under peft's names, or weights under Hugging Face's.

        Adapters are small, and gathered on every rank. Weights are yielded by the ranks that hold them, unless all
        ranks `gather` each tensor.
        """
        if self._adapters is not None:
            return self._adapters.sources(dtype=dtype)
        whole = gather or not self.ranks.mesh or self.ranks.mesh.get_rank() == 0
        return self._exporter.sources(dtype=dtype, gather=gather, writes_whole=whole)

    def named_tensors(self, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of what a version has, cast to `dtype`, gathered on every rank."""
        return full_tensors(self.sources(dtype=dtype, gather=True))

    def adapter_config(self) -> bytes | None:
        """The text of `adapter_config.json` if the learner publishes adapters, else None."""
        return None if self._adapters is None else self._adapters.config()

    def save(self, folder: Path) -> str:
        """Write a checkpoint to `folder` and wait for its files; after `load` training continues bit for bit.

        Returns the fault that `finish_save` finds.
        """
        self.begin_save(folder)
        return self.finish_save()

    def begin_save(self, folder: Path) -> None:
        """Copy the state, and let a thread write the copy to `folder`; the next step may start at once."""
        self._checkpointer.begin(folder, step=self.steps_taken, updates=self._optimizer.updates)

    def finish_save(self) -> str:
        """Wait until the last checkpoint is complete on disk and read back; return its fault, "" if it is sound.

        Raises the error of a write that failed.
        """
        return self._checkpointer.finish()

    def load(self, folder: Path) -> str:
        """Restore a checkpoint, with `steps_taken`; return how the learner differs from the files, or "".

        Raises `ConfigError` if the checkpoint is torn or of another model.
        """
        loaded = self._checkpointer.load(folder)
        self.steps_taken, self._optimizer.updates = loaded.step, loaded.updates
        if self._critic is not None:
            self._critic.optimizer.recount()
        return loaded.fault

    # ---- parts of a step

    def _completed(self, microbatches: Sequence[MicroBatch]) -> tuple[Sequence[MicroBatch], float]:
        """Return microbatches with the columns of reference and critic, and the reference's seconds."""
        started = time.perf_counter()
        if self._reference is not None:
            microbatches = self._reference.add_logprobs(microbatches)
        reference_s = time.perf_counter() - started
        return microbatches if self._critic is None else self._critic.assess(microbatches), reference_s

    def _split_updates(self, microbatches: Sequence[MicroBatch]) -> list[Update]:
        """Deal the microbatches to updates in turn, and compute the shares and `at_start` of all updates.

        The first update needs no `at_start`: its own forward pass runs on the weights of the step's start.
        """
        count = min(self._algorithm.updates_per_step, len(microbatches))
        dealt = [microbatches[first::count] for first in range(count)]
        shares = self._update_shares(dealt)
        at_start = [None, *(self._start_logprobs(batches) for batches in dealt[1:])]
        return [
            Update(batches=batches, share=share, at_start=logprobs)
            for batches, share, logprobs in zip(dealt, shares, at_start, strict=True)
        ]

    def _update_shares(self, dealt: Sequence[Sequence[MicroBatch]]) -> list[float]:
        """Share of each update in the step's loss weights, over all ranks; 1 for an update without any weight."""
        if len(dealt) == 1:
            return [1.0]
        weights = [self.ranks.sum(sum(float(batch.loss_weights.sum()) for batch in batches)) for batches in dealt]
        return [weight / (sum(weights) or 1.0) or 1.0 for weight in weights]

    def _start_logprobs(self, microbatches: Sequence[MicroBatch]) -> list[Tensor] | None:
        """Log-probabilities [N] of each batch's trained tokens now; None if the algorithm does not use them."""
        if self._algorithm.proximal is not Proximal.RECOMPUTE:
            return None
        with torch.no_grad():
            return [
                policy_logprobs(self.model, batch, trained_rows(batch, self.ranks.device))[0]
                for batch in microbatches
            ]

    def _backward(
        self, update: Update, sums: TokenSums, partition: Tensor | None, *, at_step_start: bool
    ) -> Tensor:
        """Add up the gradients of an update's microbatches in the parameters; returns this rank's loss, a scalar.

        Adds the update's tokens to `sums`. `partition` is the result of `estimate_partition`. `at_step_start`: no
        update of the step has changed the weights yet.
        """
        loss = torch.zeros((), device=self.ranks.device)
        count = len(update.batches)
        for place, batch in enumerate(update.batches):
            self.ranks.begin(
                f"microbatch {place + 1} of {count} of step {self.steps_taken + 1}", limit_s=COMPUTES_S
            )
            set_gradient_sync(self.model, self.ranks, self._settings, last=place == count - 1)
            rows = trained_rows(batch, self.ranks.device)
            logprobs, entropy = policy_logprobs(self.model, batch, rows)
            at_start = None if update.at_start is None else update.at_start[place]
            inputs = make_loss_inputs(
                batch, rows, logprobs, self._algorithm, recomputed=at_start, log_partition=partition
            )
            batch_loss = policy_loss(inputs, self._algorithm) * (1.0 / update.share)
            logprobs.retain_grad()
            batch_loss.backward()  # type: ignore[no-untyped-call]
            if self.ranks.device.type == "cpu":
                free_heap()
            if self.ranks.counts:
                self._prover.add(batch, logprobs, entropy, share=update.share)
                sums.add(inputs, entropy=entropy, settings=self._algorithm, at_step_start=at_step_start)
                loss += batch_loss.detach()
        self.ranks.begin(f"update of the weights in step {self.steps_taken + 1}", limit_s=COMPUTES_S)
        return loss

    def _measure_work(self, microbatches: Sequence[MicroBatch]) -> Work:
        """Return tokens and FLOPs of a step, summed over ranks, from this rank's `microbatches`."""
        counted = [batch for batch in microbatches if self.ranks.counts]
        tokens, squares = sum(batch.num_tokens for batch in counted), sum(batch.squares for batch in counted)
        peak = peak_flops(self.ranks.device)
        costs = [self.cost] if self._critic is None else [self.cost, self._critic.cost]
        flops = sum(cost.flops(tokens, squares) for cost in costs)
        return Work(
            int(self.ranks.sum(tokens)),
            self.ranks.sum(flops),
            None if peak is None else peak * self.ranks.num_ranks,
        )
