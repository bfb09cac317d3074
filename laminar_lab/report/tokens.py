"""Use and loss of generated tokens: the waterfall from issued to useful tokens, and the drops by reason.

The useful tokens over seconds of RL are the goodput. Each response token of a training trajectory is counted once:
issued = sum of the losses + useful (`tests/report/test_tokens.py`). Recomputed tokens and tokens of undone
steps stand beside the waterfall.
"""

from dataclasses import dataclass

import numpy as np

from laminar_lab.report.snapshot import Snapshot
from laminar_lab.report.trajectories import CAPS, REASONS, Trajectories
from laminar_py.records.codec import BoolArray
from laminar_py.records.trajectory import DropReason, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRow:
    """Ended trajectories with one drop reason or one cap, e.g.

    12 that a cap cut: 0.2 % of all, 344 tokens each.
    """

    reason: str  # "kept": consumed trajectories, also if a cap cut them
    count: int
    share: float  # of all ended trajectories
    length: float  # mean tokens
    reward: float | None  # mean of known rewards


def measure_drops(trajectories: Trajectories) -> list[DropRow]:
    """Return rows of kept trajectories, then of each drop reason and each cap that occurred."""
    t = trajectories.where(trajectories.is_status(Status.CONSUMED) | trajectories.is_status(Status.DROPPED))
    kept = t.is_status(Status.CONSUMED)
    rows = [_drop_row("kept", t, kept)]
    rows += [_drop_row(str(reason).replace("_", " "), t, t.dropped_for(reason)) for reason in REASONS]
    rows += [_drop_row(f"cap: {cap}", t, kept & (t.cap == code)) for code, cap in enumerate(CAPS)]
    return [row for row in rows if row.count]


def _drop_row(reason: str, t: Trajectories, mask: BoolArray) -> DropRow:
    rewards = t.reward[mask & ~np.isnan(t.reward)]
    return DropRow(
        reason=reason,
        count=int(mask.sum()),
        share=float(mask.mean()) if len(mask) else 0.0,
        length=float(t.length[mask].mean()) if mask.any() else 0.0,
        reward=float(rewards.mean()) if len(rewards) else None,
    )


_LOSSES = {  # name of a loss: its drop reasons; `_without_signal` divides groups without signal
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
    """Response tokens lost for one reason, e.g. `TokenLoss("stale", 4120, 40)`."""

    name: str
    tokens: int
    trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAccount:
    """Tokens of a run so far; the losses and `useful` sum to `issued`."""

    issued: int  # generated for training trajectories
    losses: tuple[TokenLoss, ...]
    useful: int  # consumed by steps that were not undone, times the weights of their losses
    issued_trajectories: int
    useful_trajectories: int  # consumed by steps that were not undone
    cut: int  # of the consumed, tokens of responses that a cap cut
    recomputed: int  # tokens of prompt and response whose KV cache was computed again after a move or new weights
    undone: int  # trained by steps that were rolled back
    rl_s: float  # seconds of RL

    @property
    def goodput(self) -> float:
        """Useful tokens per second of RL."""
        return self.useful / self.rl_s if self.rl_s else 0.0

    @property
    def useful_share(self) -> float:
        """Useful tokens over issued ones."""
        return self.useful / self.issued if self.issued else 0.0


def account_tokens(snapshot: Snapshot) -> TokenAccount:
    """Return the account of a run so far."""
    t = snapshot.trajectories
    lengths = t.length.astype(np.int64)
    consumed, skipped = t.is_status(Status.CONSUMED), np.isin(t.step, snapshot.history.skipped)
    stands = consumed & ~skipped
    masks = {name: _dropped_for_any(t, reasons) for name, reasons in _LOSSES.items()}
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


def _dropped_for_any(t: Trajectories, reasons: tuple[DropReason, ...]) -> BoolArray:
    return np.isin(t.drop, [REASONS.index(reason) for reason in reasons])


def _without_signal(t: Trajectories) -> dict[str, BoolArray]:
    """Return masks of groups without signal: all wrong (at most 0), all right (best of the run), or alike."""
    dropped = t.dropped_for(DropReason.NO_SIGNAL)
    wrong = dropped & (t.reward <= 0)
    best = np.nanmax(t.reward, initial=0.0)
    right = dropped & ~wrong & (t.reward >= best)
    return {
        "no signal: all right": right,
        "no signal: all wrong": wrong,
        "no signal: all alike": dropped & ~wrong & ~right,
    }


def waterfall(account: TokenAccount) -> list[TokenLoss]:
    """Return the rows of the waterfall: issued tokens, the losses from the largest on, useful tokens."""
    losses = sorted(account.losses, key=lambda loss: -loss.tokens)
    return [
        TokenLoss("issued", account.issued, account.issued_trajectories),
        *(TokenLoss(f"- {loss.name}", loss.tokens, loss.trajectories) for loss in losses),
        TokenLoss("= useful", account.useful, account.useful_trajectories),
    ]
