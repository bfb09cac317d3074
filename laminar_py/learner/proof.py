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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from laminar_py.learner.distributed import Ranks
from laminar_py.learner.losses.objectives import LossInputs
from laminar_py.learner.model import fingerprint, local_part
from laminar_py.learner.reference import InnerReference
from laminar_py.records.codec import IntArray
from laminar_py.records.proofs import POWERS, GradientSums, NextToken, StepProof
from laminar_py.records.trajectory import MicroBatch

STILL_UPDATES = 3  # in a row after which a tensor that has gradients must have moved
TOP = 256  # tokens of a probe's distribution
UNCHANGED = 0.05  # nats between the behaviour and the present policy


class StepProver:
    """Collects the proof of one step after the other, e.g. `StepProver(model, ranks, None)`.

    Every method but `add` is a collective. The order of a step: `begin`, then for each update `add` for its
    microbatches, `check_gradients`, `mark`, the optimizer's update, `check_moved`; at last `finish`.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks, reference: InnerReference | None) -> None:
        self._ranks = ranks
        self._trained = [(name, item) for name, item in model.named_parameters() if item.requires_grad]
        self._scale = _final_scale(model)
        frozen = None if reference is None else reference.model.parameters()
        self._reference = None if frozen is None else [local_part(item) for item in frozen]
        self._moved = self._still = torch.zeros(len(self._trained), device=ranks.device)
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._counts = np.zeros(4)  # tokens, weight, ids, numbers that are not finite
        self._sums: list[list[float]] = []  # of each update: expected, its squares, products with -w A, (w A)^2
        self._found: list[float] = []  # of each update
        self._begin_update()

    def _begin_update(self) -> None:
        self._update = torch.zeros(4, dtype=torch.float64, device=self._ranks.device)

    def add(
        self, batch: MicroBatch, inputs: LossInputs, logprobs: Tensor, entropy: Tensor, *, share: float
    ) -> None:
        """Add a microbatch after its backward pass; `logprobs`, which has its gradient, and `entropy` are [N].

        The loss was divided by the update's `share` of the step.
        """
        rows = np.flatnonzero(batch.loss_weights)
        trained = len(rows)
        given = np.isfinite(batch.behaviour_logprobs[rows]) & np.isfinite(batch.advantages[rows])
        computed = torch.isfinite(logprobs.detach()) & torch.isfinite(entropy.detach())
        not_finite = trained - int(given.sum()) + trained - int(computed.sum())
        self._counts += np.array([trained, batch.loss_weights.sum(dtype=np.float64), batch.id_sum, not_finite])
        if logprobs.grad is not None:
            parts = (logprobs.grad * (logprobs.detach() + entropy.detach())).double()
            # the gradient of a policy's loss at a token whose probability has not changed is -w A
            is_fresh = (logprobs.detach() - inputs.behaviour).abs() < UNCHANGED
            weights = torch.from_numpy(batch.loss_weights[rows]).to(parts.device)
            plain = (-weights * inputs.advantages / share * is_fresh).double()
            self._update += torch.stack(
                [parts.sum(), parts.square().sum(), (plain * logprobs.grad).sum(), plain.square().sum()]
            )

    def check_gradients(self) -> None:
        """Note both sides of the gradient's identity for an update, before gradients are clipped."""
        if self._scale is not None:
            gradient = self._scale.grad
            found = (
                0.0
                if gradient is None
                else float((local_part(gradient) * local_part(self._scale.detach())).double().sum())
            )
            self._found.append(found)
            self._sums.append(self._update.tolist())
        self._begin_update()

    def mark(self) -> None:
        """Remember, before an update, the value of each tensor where its gradient is largest."""
        places, sizes = [], []
        for _, parameter in self._trained:
            gradient = parameter.grad
            flat = None if gradient is None else local_part(gradient).flatten()
            if flat is None or not flat.numel():
                places.append(torch.zeros((), dtype=torch.long, device=self._ranks.device))
                sizes.append(torch.zeros((), device=self._ranks.device))
            else:
                size, place = flat.abs().max(0)
                places.append(place.to(self._ranks.device))
                sizes.append(size.float().to(self._ranks.device))
        self._places, self._sizes = places, torch.stack(sizes)
        self._before = self._values()

    def check_moved(self) -> None:
        """Count, after an update that was not skipped, which of the tensors with a gradient moved."""
        has_gradient = (self._sizes > 0).float()
        moved = (self._values() != self._before).float() * has_gradient
        counts = torch.stack([has_gradient, moved])
        self._ranks.reduce_tensor(counts)
        stood = (counts[0] > 0) & (counts[1] == 0)
        self._still = torch.where(stood, self._still + 1, torch.where(counts[0] > 0, 0, self._still))

    def _values(self) -> Tensor:
        """[tensors] values at the marked places; 0 where this rank has no part of a tensor."""
        values = []
        for (_, parameter), place in zip(self._trained, self._places, strict=True):
            flat = local_part(parameter).detach().flatten()
            found = flat[place.to(flat.device)] if flat.numel() else flat.new_zeros(())
            values.append(found.float().to(self._ranks.device))
        return torch.stack(values)

    def finish(self) -> StepProof:
        """Add the proofs of all ranks; return the same proof on each."""
        sums = [number for update in self._sums for number in update]
        total = torch.tensor([*self._counts, *sums, *self._found], dtype=torch.float64, device=self._ranks.device)
        self._ranks.reduce_tensor(total)
        tokens, weight, ids, not_finite, *rest = total.tolist()
        count = len(self._found)
        sums, found = np.reshape(rest[: 4 * count], (count, 4)).tolist(), rest[4 * count :]
        stood = zip(self._trained, self._still.tolist(), strict=True)
        return StepProof(
            tokens=int(tokens),
            weight=weight,
            ids=int(ids),
            not_finite=int(not_finite),
            gradients=tuple(
                GradientSums(expected, got, squares**0.5, product / norm if norm else None)
                for (expected, squares, product, norm), got in zip(sums, found, strict=True)
            ),
            still=tuple(name for (name, _), updates in stood if updates >= STILL_UPDATES),
            reference="" if self._reference is None else fingerprint(self._reference),
        )


def _final_scale(model: PreTrainedModel) -> nn.Parameter | None:
    """The scale g of the final norm, if logits are linear in it and it is trained; else None."""
    norm: Any = getattr(model.base_model, "norm", None)
    scale = getattr(norm, "weight", None)
    head = model.get_output_embeddings()
    # other norms multiply by 1 + weight, or add a bias; a bias of the head is not linear either
    is_linear = "RMSNorm" in type(norm).__name__ and "Gemma" not in type(norm).__name__
    if scale is None or not is_linear or not scale.requires_grad or getattr(head, "bias", None) is not None:
        return None
    return scale  # type: ignore[no-any-return]


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
    sums = torch.stack([(logprobs * power).logsumexp(-1) for power in POWERS], dim=1)
    rows = zip(best.indices.cpu().numpy(), best.values.cpu().numpy(), sums.cpu().numpy(), strict=True)
    return [NextToken(ids.astype(np.int32), values, normalizers) for ids, values, normalizers in rows]
