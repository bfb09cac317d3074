"""Use and loss of generated tokens: the numerator of goodput. Pure.

Every response token of a training trajectory is counted once, in one step of the waterfall: issued = sum of the
losses + useful. Beside it stand tokens that are in no response (computed again), and those that
the learner trained on in vain.
"""

from dataclasses import dataclass

import numpy as np

from laminar_py.observe.analytics.read.columns import REASONS, Trajectories
from laminar_py.observe.analytics.read.snapshot import Snapshot
from laminar_py.records.codec import BoolArray
from laminar_py.records.trajectory import DropReason, Status

_DROPS = {  # loss: reasons; those without signal are told apart by their reward
    "generated again": (DropReason.VERSION_LOST, DropReason.REFUSED, DropReason.HOST_LOST),
    "group deadline": (DropReason.GROUP_DEADLINE,),
    "group lost": (DropReason.GROUP_LOST,),
    "scoring failed": (DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT),
    "environment failed": (
        DropReason.ENVIRONMENT_FAILED,
        DropReason.ENVIRONMENT_TIMEOUT,
        DropReason.ENVIRONMENT_LOST,
    ),
    "too long for a microbatch": (DropReason.TOO_LONG,),
    "stale": (DropReason.STALE,),
    "run ended": (DropReason.RUN_ENDED,),
}


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Response tokens that taught nothing, and why, e.g. `TokenLoss("stale", 4120, 40)`."""

    name: str
    tokens: int
    trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAccount:
    """Tokens of a run so far. The losses and `useful` sum to `issued`."""

    issued: int  # generated for training trajectories, whatever became of them
    losses: tuple[TokenLoss, ...]
    useful: int  # consumed by steps that stand, each weighed as its loss was
    issued_trajectories: int
    useful_trajectories: int  # consumed by steps that stand
    cut: int  # of the consumed, tokens of responses that a cap cut
    recomputed: int  # tokens of prompt and response whose KV cache was computed again after a move or new weights
    undone: int  # trained by steps that were rolled back, so trained again
    rl_s: float  # seconds of RL

    @property
    def goodput(self) -> float:
        """Useful tokens a second of RL: B K L_useful / tau_step, averaged over the run."""
        return self.useful / self.rl_s if self.rl_s else 0.0

    @property
    def useful_share(self) -> float:
        """Useful tokens over issued ones."""
        return self.useful / self.issued if self.issued else 0.0


def account_tokens(snapshot: Snapshot) -> TokenAccount:
    """Account of the whole run so far."""
    t = snapshot.trajectories
    lengths = t.length.astype(np.int64)
    consumed, skipped = t.is_status(Status.CONSUMED), np.isin(t.step, snapshot.history.skipped)
    stands = consumed & ~skipped
    masks = {name: _dropped(t, reasons) for name, reasons in _DROPS.items()}
    masks |= _without_signal(t)
    masks["still live"] = ~consumed & ~t.is_status(Status.DROPPED)
    masks["step skipped"] = consumed & skipped
    masked = stands & (t.weight == 0) & (t.cap >= 0)
    masks["cut, masked from the loss"], stands = masked, stands & ~masked
    losses = [TokenLoss(name, int(lengths[mask].sum()), int(mask.sum())) for name, mask in masks.items()]
    whole = int(lengths[stands].sum())
    useful = round(float(np.sum(lengths[stands] * t.weight[stands].astype(np.float64))))
    losses.append(TokenLoss("weighed less for staleness", whole - useful, int((stands & (t.weight < 1)).sum())))
    return TokenAccount(
        issued=int(lengths.sum()),
        losses=tuple(loss for loss in losses if loss.trajectories),
        useful=useful,
        issued_trajectories=len(t),
        useful_trajectories=int(stands.sum()),
        cut=int(lengths[stands & (t.cap >= 0)].sum()),
        recomputed=snapshot.recomputed,
        undone=snapshot.history.undone_tokens,
        rl_s=snapshot.samples.rl_s,
    )


def _dropped(t: Trajectories, reasons: tuple[DropReason, ...]) -> BoolArray:
    return np.isin(t.drop, [REASONS.index(reason) for reason in reasons])


def _without_signal(t: Trajectories) -> dict[str, BoolArray]:
    """Wrong is a reward of 0 or less, right the best reward of the run above 0."""
    dropped = t.dropped_for(DropReason.NO_SIGNAL)
    wrong = dropped & (t.reward <= 0)
    best = np.nanmax(t.reward, initial=0.0)
    right = dropped & ~wrong & (t.reward >= best)
    return {
        "no signal: all right": right,
        "no signal: all wrong": wrong,
        "no signal: all alike": dropped & ~wrong & ~right,
    }
