"""Proof of an update: which tensors moved, and whether as AdamW moves them. `proof` and `critic` use it.

It samples one value of each tensor with its moments, and compares the update with the definition (`expected`). A
critic's gradients are checked here, too, by the identity that `proof` explains.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from laminar_py.config.learner import LearnerConfig
from laminar_py.learner.distributed import Ranks
from laminar_py.learner.expected import differs, updated
from laminar_py.learner.model import local_part
from laminar_py.records.proofs import GradientSums

STILL_UPDATES = 3  # in a row after which a tensor that has gradients must have moved
SPREAD = 4096  # values of a tensor among which the largest gradient is looked for
VISIBLE = 16 * 2.0**-23  # a value's size times this is 16 of its steps in fp32, the least `lr` that must show


class UpdateProver:
    """Watches the updates of one model by an optimizer with these `settings`.

    The order of a step: `begin`, then for each update `mark`, the optimizer's update, and `check_moved` unless the
    update was skipped. Names of tensors begin with `prefix`.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks, settings: LearnerConfig, *, prefix: str = "") -> None:
        self._ranks = ranks
        self._settings = settings
        every = [(f"{prefix}{name}", item) for name, item in model.named_parameters()]
        self._trained = [(name, item) for name, item in every if item.requires_grad]
        frozen = [name for name, item in every if not item.requires_grad]
        self._frozen = tuple(name for name in frozen if settings.lora is None or ".lora_" in name)  # by mistake
        self._still = torch.zeros(len(self._trained), device=ranks.device)
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._moved = torch.zeros(2, device=self._ranks.device)  # tensors that moved, and of these uphill
        self._astray = torch.zeros(len(self._trained), device=self._ranks.device)  # wrong updates of each tensor

    def mark(self, adamw: torch.optim.AdamW) -> None:
        """Remember, before an update, one value of each tensor with its moments: where the gradient is largest
        among `SPREAD`."""
        found = [_largest(item.grad) for _, item in self._trained]
        held = [place for place in found if place is not None]
        places = iter(torch.stack(held).tolist() if held else ())
        self._places = [None if place is None else next(places) for place in found]
        self._slopes = self._values([item.grad for _, item in self._trained])
        self._before = self._values([item for _, item in self._trained])
        states = [adamw.state.get(item, {}) for _, item in self._trained]
        self._moments = (
            self._values([state.get("exp_avg") for state in states]),
            self._values([state.get("exp_avg_sq") for state in states]),
        )

    def check_moved(self, *, lr: float, norm: float, updates: int) -> None:
        """Count, after an update with rate `lr` that was not skipped, which tensors moved, and which uphill.

        A tensor is astray without gradients, or if AdamW would have moved it otherwise with gradients of
        `norm` in the run's update number `updates`. A value so large that fp32 may not show an update of `lr` does
        not count as still. Collective.
        """
        after = self._values([item for _, item in self._trained])
        by = after - self._before
        has_gradient = (self._slopes != 0).float()
        could_move = has_gradient * (self._before.abs() * VISIBLE < lr)
        of_adamw = updated(
            self._before, self._slopes, self._moments, self._settings, norm=norm, lr=lr, updates=updates
        )
        is_wrong = differs(after, of_adamw, lr=lr).float()
        is_held = torch.tensor([float(place is not None) for place in self._places], device=by.device)
        counts = torch.stack(
            [could_move, (by != 0) * has_gradient, (by * self._slopes > 0).float(), is_wrong, is_held]
        )
        self._ranks.reduce_tensor(counts)
        self._moved += counts[1:3].sum(dim=1)
        self._astray += (counts[3] > 0) | (counts[4] == 0)
        stood = (counts[0] > 0) & (counts[1] == 0)
        self._still = torch.where(stood, self._still + 1, torch.where(counts[1] > 0, 0, self._still))

    def _values(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """[tensors] values at the marked places, which may be on the host; 0 where this rank has no part."""
        found = [
            None if one is None or place is None else local_part(one.detach()).view(-1)[place]
            for one, place in zip(tensors, self._places, strict=True)
        ]
        zero = torch.zeros((), device=next((one.device for one in found if one is not None), self._ranks.device))
        return torch.stack([zero if one is None else one.float() for one in found]).to(self._ranks.device)

    @property
    def moved(self) -> tuple[int, int]:
        """Tensors with gradients that the step's updates changed, and how many moved along their gradients."""
        moved, uphill = (int(count) for count in self._moved.tolist())
        return moved, uphill

    @property
    def still(self) -> tuple[str, ...]:
        """Tensors that had gradients in `STILL_UPDATES` updates in a row and did not change."""
        stood = zip(self._trained, self._still.tolist(), strict=True)
        return tuple(name for (name, _), updates in stood if updates >= STILL_UPDATES)

    @property
    def astray(self) -> tuple[str, ...]:
        """Tensors that are frozen by mistake, have no gradient, or moved unlike AdamW moves them in this step."""
        wrong = zip(self._trained, self._astray.tolist(), strict=True)
        return self._frozen + tuple(name for (name, _), updates in wrong if updates)


class CriticProver(UpdateProver):
    """Watches the critic's updates, and whether their gradients are of their losses.

    As in `proof`, with the scale g of the final norm and c_t = dL/dV_t: values are linear in g, so
    `<dL/dg, g> = sum_t c_t V_t`. The left side has passed the backward pass and the sum over ranks.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks, settings: LearnerConfig) -> None:
        super().__init__(model, ranks, settings, prefix="critic.")
        self._scale = final_scale(model)
        self._begin_update()

    def begin(self) -> None:
        """Begin a step."""
        super().begin()
        self.gradients: list[GradientSums] = []  # of each update that was not skipped

    def _begin_update(self) -> None:
        # expected, its squares, sizes, found
        self._sums = torch.zeros(4, dtype=torch.float64, device=self._ranks.device)

    def add(self, values: Tensor) -> None:
        """Note the `values` [N] of a microbatch after its backward pass, with their gradient."""
        slopes = torch.zeros_like(values) if values.grad is None else values.grad
        parts = (slopes * values.detach()).double()
        self._sums[:3] += torch.stack([parts.sum(), (parts * parts).sum(), slopes.abs().sum()])

    def check_gradients(self) -> None:
        """Add up both sides over ranks, before gradients are clipped. Collective."""
        if self._scale is not None and self._scale.grad is not None:
            product = (local_part(self._scale.grad) * local_part(self._scale.detach())).double().sum()
            self._sums[3] = float(product) / self._ranks.num_copies  # each copy of a shard adds it
        self._ranks.reduce_tensor(self._sums)
        expected, squares, size, found = self._sums.tolist()
        self._update = GradientSums(expected=expected, found=found, spread=squares**0.5, size=size, scale=None)
        self._begin_update()

    def check_moved(self, *, lr: float, norm: float, updates: int) -> None:
        """Check an update that was not skipped, as `UpdateProver` does, and keep its sums."""
        super().check_moved(lr=lr, norm=norm, updates=updates)
        if self._scale is not None:
            self.gradients.append(self._update)


def final_scale(model: PreTrainedModel) -> nn.Parameter | None:
    """Return the scale g of the final norm, if logits are linear in it and it is trained; else None."""
    norm: Any = getattr(model.base_model, "norm", None)
    scale = getattr(norm, "weight", None)
    head = model.get_output_embeddings()
    # other norms multiply by 1 + weight, or add a bias; a bias of the head is not linear either
    is_linear = "RMSNorm" in type(norm).__name__ and "Gemma" not in type(norm).__name__
    if scale is None or not is_linear or not scale.requires_grad or getattr(head, "bias", None) is not None:
        return None
    return scale  # type: ignore[no-any-return]


def _largest(gradient: Tensor | None) -> Tensor | None:
    """Place of the largest among `SPREAD` values of this rank's part of a gradient, at even distances; None
    without a part."""
    if gradient is None or not (values := local_part(gradient.detach()).view(-1)).numel():
        return None
    stride = len(values) // SPREAD + 1
    return values[::stride].abs().argmax() * stride
