"""Use and loss of generated tokens: the waterfall from issued to useful tokens.

The useful tokens over seconds of RL are the goodput. Each response token of a training trajectory counts once, as
useful or in one loss, so losses and useful tokens sum to the issued tokens. The same holds for trajectories
(`tests/report/test_tokens.py`). Recomputed tokens and tokens of undone steps stand beside the waterfall.
"""

from dataclasses import dataclass, replace

import numpy as np

from laminar_lab.report.snapshot import Snapshot
from laminar_lab.report.trajectories import REASONS, Trajectories
from laminar_py.records.codec import BoolArray
from laminar_py.records.trajectory import DropReason, Status

_LOSSES = {  # name of a loss: its drop reasons; `_without_signal` divides groups without signal
    "generated again": (DropReason.VERSION_LOST, DropReason.REFUSED, DropReason.TOKENS_LOST),
    "group deadline": (DropReason.GROUP_DEADLINE,),
    "group lost": (DropReason.GROUP_LOST,),
    "scoring failed": (DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT),
    "environment failed": (
        DropReason.ENVIRONMENT_FAILED,
        DropReason.ENVIRONMENT_TIMEOUT,
        DropReason.ENVIRONMENT_LOST,
    ),
    "too long for a microbatch": (DropReason.TOO_LONG,),
    "dropped as stale": (DropReason.STALE,),
    "run ended": (DropReason.RUN_ENDED,),
}


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Response tokens lost for one reason, e.g. `TokenLoss("dropped as stale", 4120, 40, 0.25)`."""

    name: str
    tokens: int
    trajectories: int  # 0: trajectories that count as useful have a weight below 1
    reward: float | None  # mean of known rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAccount:
    """Tokens and trajectories of a run so far; of both the losses and the useful ones sum to the issued ones."""

    issued: int  # generated for training trajectories
    losses: tuple[TokenLoss, ...]
    useful: int  # consumed by steps that were not undone, times the weights of their losses
    issued_trajectories: int
    useful_trajectories: int  # consumed by steps that were not undone
    issued_reward: float | None  # mean of known rewards, as in `TokenLoss`
    useful_reward: float | None
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
    masks[snapshot.history.left_word] = ~consumed & ~t.is_status(Status.DROPPED)
    masks["step skipped"] = consumed & skipped
    masked = stands & (t.weight == 0) & (t.cap >= 0)
    masks["cut, masked from the loss"], stands = masked, stands & ~masked
    losses = [
        TokenLoss(name, int(lengths[mask].sum()), int(mask.sum()), _mean_reward(t, mask))
        for name, mask in masks.items()
    ]
    whole = int(lengths[stands].sum())
    useful = round(float(np.sum(lengths[stands] * t.weight[stands].astype(np.float64))))
    losses.append(TokenLoss("counted less as stale", whole - useful, 0, None))
    return TokenAccount(
        issued=int(lengths.sum()),
        losses=tuple(loss for loss in losses if loss.trajectories or loss.tokens),
        useful=useful,
        issued_trajectories=len(t),
        useful_trajectories=int(stands.sum()),
        issued_reward=_mean_reward(t, np.ones(len(t), np.bool_)),
        useful_reward=_mean_reward(t, stands),
        cut=int(lengths[stands & (t.cap >= 0)].sum()),
        recomputed=snapshot.recomputed,
        undone=snapshot.history.undone_tokens,
        rl_s=snapshot.samples.rl_s,
    )


def _mean_reward(t: Trajectories, mask: BoolArray) -> float | None:
    rewards = t.reward[mask & ~np.isnan(t.reward)]
    return float(rewards.mean()) if len(rewards) else None


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
        TokenLoss("issued", account.issued, account.issued_trajectories, account.issued_reward),
        *(replace(loss, name=f"- {loss.name}") for loss in losses),
        TokenLoss("= useful", account.useful, account.useful_trajectories, account.useful_reward),
    ]


TOKEN_COLUMNS = ("tokens", "share", "trajectories", "mean reward")


def token_cells(account: TokenAccount) -> list[list[str]]:
    """Return the rows of the waterfall as texts: the name, then `TOKEN_COLUMNS`."""
    return [
        [
            row.name,
            f"{row.tokens:,}",
            f"{row.tokens / max(1, account.issued):.1%}",
            f"{row.trajectories:,}" if row.trajectories or not row.tokens else "-",
            "-" if row.reward is None else f"{row.reward:.3g}",
        ]
        for row in waterfall(account)
    ]
