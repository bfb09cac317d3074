"""Proof of an update: which tensors moved, and whether as AdamW moves them. `proof` and `critic` use it.

It samples one value of each tensor with its moments, and compares the update with the definition (`expected`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from laminar_py.config.learner import LearnerConfig
from laminar_py.learner.distributed import Ranks
from laminar_py.learner.expected import differs, updated
from laminar_py.learner.model import local_part

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
        gradients = [None if item.grad is None else _spread(item.grad) for _, item in self._trained]
        self._places = [  # [1] each; None where this rank has no gradient
            None if one is None or not one.numel() else one.abs().argmax(dim=0, keepdim=True) for one in gradients
        ]
        self._slopes = self._values(gradients)
        self._before = self._values([_spread(item) for _, item in self._trained])
        states = [adamw.state.get(item, {}) for _, item in self._trained]
        first, second = (
            self._values([_spread(state[name]) if name in state else None for state in states])
            for name in ("exp_avg", "exp_avg_sq")
        )
        self._moments = (first, second)

    def check_moved(self, *, lr: float, norm: float, updates: int) -> None:
        """Count, after an update with rate `lr` that was not skipped, which tensors moved, and which uphill.

        A tensor is astray without gradients, or if AdamW would have moved it otherwise with gradients of
        `norm` in the run's update number `updates`. A value so large that fp32 may not show an update of `lr` does
        not count as still. Collective.
        """
        after = self._values([_spread(item) for _, item in self._trained])
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

    def _values(self, spread: Sequence[Tensor | None]) -> Tensor:
        """[tensors] values at the marked places, which may be on the host; 0 where this rank has no part."""
        found = [
            None if one is None or place is None else one.take(place).float()
            for one, place in zip(spread, self._places, strict=True)
        ]
        zero = torch.zeros(1, device=next((one.device for one in found if one is not None), self._ranks.device))
        return torch.cat([zero if one is None else one for one in found]).to(self._ranks.device)

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


def _spread(tensor: Tensor) -> Tensor:
    """Up to `SPREAD` values of this rank's part of a tensor, at even distances."""
    flat = local_part(tensor).detach().flatten()
    return flat[:: len(flat) // SPREAD + 1]
