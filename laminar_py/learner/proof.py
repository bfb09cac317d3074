"""Proof of a learner step: what its losses counted, whether the gradients are theirs, and which weights moved.

`step.Learner` feeds a `StepProver` beside its own sums, so that a mistake in the step shows as a difference. The
controller compares the proof with the ledger (`control.alarms.learning`).

The gradient's identity: logits are linear in the scale g of the final norm, z = W (g * n). So for a loss L of
log-probabilities, `<dL/dg, g> = sum_t <dL/dz_t, z_t> = sum_t c_t (log p_t + H_t)`, where c_t = dL/d log p_t and
H_t is the entropy at token t: with u = z / T, `d log p_y / dz = (onehot(y) - p) / T`, whose product with z is
`u_y - E_p[u] = log p_y + H`. The left side has passed the backward pass, all microbatches and the sum over ranks.
The right side needs one number for each token.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from laminar_py.config.algorithm import AlgorithmConfig, Divergence
from laminar_py.config.learner import LearnerConfig
from laminar_py.learner.distributed import Ranks
from laminar_py.learner.losses.objectives import LARGEST
from laminar_py.learner.model import fingerprint, local_part
from laminar_py.learner.moves import CriticProver, UpdateProver, final_scale
from laminar_py.learner.reference import InnerReference
from laminar_py.records.codec import IntArray
from laminar_py.records.columns import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from laminar_py.records.proofs import POWERS, ExactTokens, GradientSums, NextToken, StepProof
from laminar_py.records.trajectory import MicroBatch

TOP = 1024  # tokens of a probe's distribution
UNSURE = -0.1  # nats; the engine's and the learner's rounding rarely agree below
UNCHANGED, EXACT = 0.05, 2e-5  # nats between the behaviour and the present policy


class StepProver:
    """Collects the proof of one step after the other, e.g. `StepProver(model, ranks, None, settings, algorithm)`.

    Every method but `add` is a collective. The order of a step: `begin`, then for each update `add` for its
    microbatches, `check_gradients`, `mark`, the optimizer's update, `check_moved` unless it was skipped,
    `end_update`; at last `finish`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        reference: InnerReference | None,
        settings: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        critic: CriticProver | None = None,
    ) -> None:
        """`critic` watches the value model, whose tensors the proof names beside the policy's."""
        self._ranks = ranks
        self._algorithm = algorithm
        self._critic = critic
        self._scale = final_scale(model)
        of_reference = [] if reference is None else reference.parameters()
        self._reference = [local_part(item) for item in of_reference]
        self._moves = UpdateProver(model, ranks, settings)
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._moves.begin()
        self._counts = np.zeros(6)  # tokens, weight, ids, signal, gain, fresh tokens
        # copied and unsure tokens; sum of |policy - reference| over the fresh ones; drift
        self._tokens = self._zeros(4)
        self._not_finite = self._zeros(1)  # numbers in updates that were not skipped
        self._sums: list[list[float]] = []  # of each update that was not skipped: see `_update`
        self._found: list[float] = []  # likewise
        self._begin_update()

    def _begin_update(self) -> None:
        self._recorded: list[npt.NDArray[np.float64]] = []  # [7, N] by microbatch, see `add`
        self._computed: list[Tensor] = []  # [3, N], likewise

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=self._ranks.device)

    def add(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, *, share: float) -> None:
        """Note a microbatch after its backward pass; `logprobs`, which has its gradient, and `entropy` are [N].

        The loss was divided by the update's `share` of the step. The proof reads the batch itself,
        not the inputs of the loss.
        """
        rows = np.flatnonzero(batch.loss_weights)
        recorded = (batch.loss_weights, batch.advantages, batch.behaviour_logprobs)
        weights, advantages, behaviour = (values[rows].astype(np.float64) for values in recorded)
        signal, is_fresh = weights * advantages, batch.staleness[rows] == 0
        rewards = np.repeat(batch.rewards[batch.responses], np.diff(np.searchsorted(rows, batch.cu_seqlens)))
        gain = float(signal @ rewards)
        self._counts += (len(rows), weights.sum(), batch.id_sum, signal.sum(), gain, is_fresh.sum())
        none, refers = np.zeros(len(rows)), REFERENCE_LOGPROBS in batch.columns
        is_penalised, is_taught = self._algorithm.kl_coef > 0, self._algorithm.teacher_coef > 0
        reference = batch.columns[REFERENCE_LOGPROBS][rows] if refers or is_penalised else none
        teacher = batch.columns[TEACHER_LOGPROBS][rows] if is_taught else none
        self._recorded.append(
            np.stack([behaviour, advantages, weights, weights / share, reference, teacher, is_fresh & refers])
        )
        gradient = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
        self._computed.append(torch.stack([logprobs.detach(), entropy.detach(), gradient]))

    def check_gradients(self) -> None:
        """Note both sides of the identity for an update, before gradients are clipped."""
        # expected, its squares, sizes; products with the definition's gradients, their squares; `ExactTokens`
        self._update = self._zeros(8)
        self._faulty = self._zeros(1)  # numbers that are not finite
        if self._computed:
            self._add_up()
        gradient = None if self._scale is None else self._scale.grad
        self._gradient = 0.0
        if self._scale is not None and gradient is not None:
            product = (local_part(gradient) * local_part(self._scale.detach())).double().sum()
            self._gradient = float(product) / self._ranks.num_copies  # each copy of a shard adds it

    def _add_up(self) -> None:
        """Sum over the tokens of an update."""
        now, entropy, gradient = torch.cat(self._computed, dim=1).double()
        recorded = np.concatenate(self._recorded, axis=1)
        of_tokens = torch.from_numpy(recorded).to(now.device)
        behaviour, advantages, weights, shares, reference, teacher, refers = of_tokens
        unsure, surplus = now < UNSURE, now + entropy
        copied, drift = unsure & (now == behaviour), weights * (behaviour - now)
        apart = torch.where(refers > 0, (now - reference).abs(), 0.0)
        self._tokens += torch.stack([copied.sum(), unsure.sum(), apart.sum(), drift.sum()])
        is_recorded = np.isfinite(recorded[:2]).all(axis=0)
        self._faulty += int((~is_recorded).sum()) + (~torch.isfinite(surplus)).sum()
        parts, signal = gradient * surplus, shares * advantages
        penalty = shares * self._slopes_of_penalties(now, reference=reference, teacher=teacher)
        # the gradient of a policy's loss at a token whose probability has not changed is -w A and its penalty
        change, plain = (now - behaviour).abs(), penalty - signal
        exact = torch.where(change < EXACT, torch.stack([gradient - plain, signal, penalty]).abs(), 0.0)
        near = torch.where(change < UNCHANGED, plain, 0.0)
        products = (parts, parts * parts, gradient.abs(), near * gradient, near * near, *exact)
        self._update = torch.stack(products).sum(1)

    def _slopes_of_penalties(self, now: Tensor, *, reference: Tensor, teacher: Tensor) -> Tensor:
        """[N] derivatives by the log-probability `now` of the terms besides the advantage in a token's loss.

        The loss cuts the differences at `LARGEST`.
        """
        algorithm, slopes = self._algorithm, torch.zeros_like(now)
        if algorithm.kl_coef > 0:
            gap = (now - reference).clamp(-LARGEST, LARGEST)
            if algorithm.kl_estimator is Divergence.K3:  # flat where it is cut
                gap = torch.where(gap.abs() < LARGEST, -(-gap).expm1(), 0.0)
            slopes += algorithm.kl_coef * gap
        if algorithm.teacher_coef > 0:
            slopes += algorithm.teacher_coef * (now - teacher).clamp(-LARGEST, LARGEST)
        return slopes

    def mark(self, adamw: torch.optim.AdamW) -> None:
        """Remember values of the policy before an update."""
        self._moves.mark(adamw)

    def check_moved(self, *, lr: float, norm: float, updates: int) -> None:
        """Check an update that was not skipped, as `UpdateProver.check_moved` does, and keep its sums."""
        self._moves.check_moved(lr=lr, norm=norm, updates=updates)
        self._not_finite += self._faulty
        if self._scale is not None:
            self._found.append(self._gradient)
            self._sums.append(self._update.tolist())

    def end_update(self) -> None:
        """Forget the sums of an update, which may have been skipped."""
        self._begin_update()

    def finish(self) -> StepProof:
        """Add the proofs of all ranks; the hash of the reference is of this rank's part."""
        sums = [number for update in self._sums for number in update]
        own = [*self._counts, *self._tokens.tolist(), *self._not_finite.tolist(), *self._found, *sums]
        total = torch.tensor(own, dtype=torch.float64, device=self._ranks.device)
        self._ranks.reduce_tensor(total)
        tokens, weight, ids, signal, gain, fresh, copied, unsure, apart, drift, not_finite, *rest = total.tolist()
        count = len(self._found)
        found, sums = rest[:count], np.reshape(rest[count:], (count, 8)).tolist()
        moved, uphill = self._moves.moved
        watched = [self._moves, *([] if self._critic is None else [self._critic])]
        of_critic = [] if self._critic is None else self._critic.gradients
        of_policy = [
            GradientSums(
                expected=expected,
                found=got,
                spread=squares**0.5,
                size=size,
                scale=product / norm if norm else None,
                exact=ExactTokens(*exact),
            )
            for (expected, squares, size, product, norm, *exact), got in zip(sums, found, strict=True)
        ]
        return StepProof(
            tokens=int(tokens),
            weight=weight,
            ids=int(ids),
            signal=signal,
            gain=gain,
            not_finite=int(not_finite),
            copied=int(copied),
            unsure=int(unsure),
            fresh=int(fresh),
            drift=drift,
            reference_gap=apart / max(1.0, fresh),
            gradients=(*of_policy, *of_critic),
            still=tuple(name for one in watched for name in one.still),
            astray=tuple(name for one in watched for name in one.astray),
            moved=moved,
            uphill=uphill,
            reference=fingerprint(self._reference) if self._reference else "",
        )


def probe_batch(prompts: Sequence[IntArray]) -> MicroBatch:
    """Pack prompts into one row without a loss."""
    lengths = [len(prompt) for prompt in prompts]
    total, count = sum(lengths), len(prompts)
    unused = np.zeros(total, np.float32)
    return MicroBatch(
        input_ids=np.concatenate(prompts).astype(np.int32),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        labels=np.zeros(total, np.int32),
        loss_weights=unused,
        behaviour_logprobs=unused,
        advantages=unused,
        staleness=np.zeros(total, np.int32),
        responses=np.arange(count, dtype=np.int32),
        rewards=np.zeros(count, np.float32),
        groups=np.zeros(count, np.int32),
    )


def next_tokens(logprobs: Tensor) -> list[NextToken]:
    """Describe distributions `logprobs [K, V]`, by their most probable tokens and the sums of their powers."""
    best = logprobs.topk(min(TOP, logprobs.shape[1]))
    sums = (logprobs[:, None] * torch.tensor(POWERS, device=logprobs.device)[:, None]).logsumexp(-1)
    rows = zip(best.indices.cpu().numpy(), best.values.cpu().numpy(), sums.cpu().numpy(), strict=True)
    return [NextToken(ids.astype(np.int32), values, normalizers) for ids, values, normalizers in rows]
