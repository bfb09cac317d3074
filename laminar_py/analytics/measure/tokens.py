"""Where generated tokens went: the numerator of goodput. Reads the ledger alone.

Every response token of a training trajectory is counted once, in one part of the waterfall: issued = sum of the
parts + useful. Beside it stand tokens that are in no response (computed again, generated for a probe), and what
the learner trained on in vain.
"""

from dataclasses import dataclass

import numpy as np

from laminar_py.analytics.read.columns import REASONS, Trajectories
from laminar_py.analytics.read.scan import Scan
from laminar_py.records.codec import BoolArray
from laminar_py.records.trajectory import DropReason, Status

_DROPS = {  # part: reasons; those without signal are told apart by their reward
    "generated again": (DropReason.VERSION_LOST, DropReason.REFUSED),
    "group deadline": (DropReason.GROUP_DEADLINE,),
    "group lost": (DropReason.GROUP_LOST,),
    "scoring failed": (DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT),
    "too long for a microbatch": (DropReason.TOO_LONG,),
    "stale": (DropReason.STALE,),
    "run ended": (DropReason.RUN_ENDED,),
}


@dataclass(frozen=True, slots=True)
class Part:
    """Response tokens that taught nothing, and why, e.g. `Part("stale", 4120, 40)`."""

    name: str
    tokens: int
    trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAccount:
    """Tokens of a run so far. The parts and `useful` sum to `issued`."""

    issued: int  # generated for training trajectories, whatever became of them
    parts: tuple[Part, ...]
    useful: int  # consumed by steps that stand, each weighed as its loss was
    issued_trajectories: int
    useful_trajectories: int  # consumed by steps that stand
    cut: int  # of the consumed, tokens of responses that a cap cut
    recomputed: int  # tokens of prompt and response whose KV cache was computed again after a move or new weights
    probed: int  # generated for probes after they were dropped
    undone: int  # trained by steps that were rolled back, so trained again
    rl_s: float  # seconds of RL

    @property
    def goodput(self) -> float:
        """Useful tokens a second of RL: B K L_useful / tau_step, averaged over the run."""
        return self.useful / self.rl_s if self.rl_s else 0.0

    @property
    def useful_share(self) -> float:
        """Of the issued."""
        return self.useful / self.issued if self.issued else 0.0


def account_tokens(t: Trajectories, scan: Scan, *, undone: int, rl_s: float) -> TokenAccount:
    """Of the ledger that both were read from; `undone` tokens were trained by steps that were rolled back."""
    lengths = t.length.astype(np.int64)
    consumed, skipped = t.is_status(Status.CONSUMED), np.isin(t.step, scan.skipped_steps)
    stands = consumed & ~skipped
    parts = {name: _dropped(t, reasons) for name, reasons in _DROPS.items()}
    parts |= _without_signal(t)
    parts["still live"] = ~consumed & ~t.is_status(Status.DROPPED)
    parts["step skipped"] = consumed & skipped
    told = [Part(name, int(lengths[mask].sum()), int(mask.sum())) for name, mask in parts.items()]
    whole = int(lengths[stands].sum())
    useful = round(float(np.sum(lengths[stands] * t.weight[stands].astype(np.float64))))
    told.append(Part("weighed less for staleness", whole - useful, int((stands & (t.weight < 1)).sum())))
    return TokenAccount(
        issued=int(lengths.sum()),
        parts=tuple(part for part in told if part.trajectories),
        useful=useful,
        issued_trajectories=len(t),
        useful_trajectories=int(stands.sum()),
        cut=int(lengths[stands & (t.cap >= 0)].sum()),
        recomputed=scan.recomputed,
        probed=int(scan.probes.length.sum() - lengths[np.searchsorted(t.number, scan.probes.number)].sum()),
        undone=undone,
        rl_s=rl_s,
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
