"""Use and loss of what was generated: the numerator of goodput; and what dropping takes away. Pure.

A trajectory is judged when it has ended, by the length that it had then. Groups without signal are a filter of
their own: kept, where other reasons are judged. Every response token of a training trajectory is counted once,
in one step of the waterfall: issued = sum of the losses + useful. Beside it stand tokens that are in no response
(computed again), and those that the learner trained on in vain.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laminar_py.observe.record import Snapshot
from laminar_py.observe.trajectories import CAPS, REASONS, Trajectories
from laminar_py.records.codec import BoolArray
from laminar_py.records.trajectory import Cap, DropReason, Status

ANY = "any but no_signal"
MIN_KNOWN = 20  # rewards without which nothing is said of them

_QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_APART = (DropReason.NO_SIGNAL, DropReason.RUN_ENDED)


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Trajectories of one range of lengths, e.g. `LengthBin(0.12, 30, 0.4)`; None: no reward of any is known."""

    share: float  # of all that ended in this range
    known: int  # whose reward is known
    reward: float | None  # their mean


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRow:
    """Trajectories that one reason dropped, or one cap cut."""

    reason: str
    count: int
    share: float  # of all that ended
    unfinished: int  # whose length in the end nobody knows: they were to be longer
    length: float  # mean tokens of those that had begun
    known: int  # whose reward is known
    reward: float | None  # their mean
    expected: float | None  # mean reward of kept ones of the same lengths
    error: float  # standard error of `reward`
    bins: tuple[LengthBin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropTable:
    """Rows over the same bins of length; `kept` reached the learner, or only lacked signal."""

    edges: tuple[int, ...]  # longest response of each bin
    ended: int
    kept: DropRow
    any: DropRow  # all reasons but those that stand apart
    rows: tuple[DropRow, ...]  # of reasons and caps that occurred
    graded: bool  # rewards other than 0 and 1 occur


def measure_drops(trajectories: Trajectories) -> DropTable:
    """Drops among the trajectories that have ended so far."""
    t = trajectories.where(trajectories.is_status(Status.CONSUMED) | trajectories.is_status(Status.DROPPED))
    dropped = t.is_status(Status.DROPPED)
    apart = np.logical_or.reduce([t.dropped_for(reason) for reason in _APART])
    judge = _Judge(t, kept=~dropped | t.dropped_for(DropReason.NO_SIGNAL))
    rows = [judge.row(str(reason), t.dropped_for(reason)) for reason in REASONS if reason not in _APART]
    rows += [judge.row(f"cap: {cap}", ~dropped & (t.cap == code)) for code, cap in enumerate(CAPS)]
    trained = _Judge(t, kept=~dropped, edges=judge.edges)
    rows += [trained.row(str(reason), t.dropped_for(reason)) for reason in _APART]
    known = t.reward[~np.isnan(t.reward)]
    return DropTable(
        edges=tuple(judge.edges.tolist()),
        ended=len(t),
        kept=judge.row("kept", judge.kept),
        any=judge.row(ANY, dropped & ~apart),
        rows=tuple(row for row in rows if row.count),
        graded=bool(np.any((known != 0) & (known != 1))),
    )


class _Judge:
    """Compares what was dropped with what was kept, bin by bin."""

    def __init__(
        self, ended: Trajectories, *, kept: BoolArray, edges: npt.NDArray[np.int64] | None = None
    ) -> None:
        self.kept = kept
        self._lengths, self._rewards = ended.length.astype(np.int64), ended.reward.astype(np.float64)
        self._unfinished = ended.finish < 0  # was to be longer
        if edges is None:
            found = self._lengths
            edges = np.unique(np.quantile(found, _QUANTILES, method="higher")) if len(found) else found
        self.edges = edges
        self._bins = np.minimum(np.searchsorted(edges, self._lengths), max(0, len(edges) - 1))
        self._num = self._count(np.ones_like(kept))
        self._known = ~np.isnan(self._rewards)
        _, self._kept_reward = self._rewards_of(kept)

    def row(self, reason: str, mask: BoolArray) -> DropRow:
        """Row of the trajectories in `mask` [N]."""
        count = int(mask.sum())
        in_bins = self._count(mask)
        known_in, reward_in = self._rewards_of(mask)
        rewards = self._rewards[mask & self._known]
        comparable = (known_in > 0) & ~np.isnan(self._kept_reward)
        weights = np.where(comparable, known_in, 0)
        begun = mask & (self._lengths > 0)
        return DropRow(
            reason=reason,
            count=count,
            share=count / max(1, len(mask)),
            unfinished=int((mask & self._unfinished).sum()),
            length=float(self._lengths[begun].mean()) if begun.any() else 0.0,
            known=len(rewards),
            reward=float(rewards.mean()) if len(rewards) else None,
            expected=float(np.nansum(weights * self._kept_reward) / weights.sum()) if weights.any() else None,
            error=float(rewards.std() / np.sqrt(len(rewards))) if len(rewards) else 0.0,
            bins=tuple(
                LengthBin(count / whole if whole else 0.0, known, reward if known else None)
                for count, whole, known, reward in zip(
                    in_bins.tolist(), self._num.tolist(), known_in.tolist(), reward_in.tolist(), strict=True
                )
            ),
        )

    def _count(self, mask: BoolArray) -> npt.NDArray[np.float64]:
        """How many are in each bin."""
        return np.bincount(self._bins[mask], minlength=len(self.edges)).astype(np.float64)

    def _rewards_of(self, mask: BoolArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """How many rewards of each bin are known, and their mean; NaN for none."""
        of = mask & self._known
        known = np.bincount(self._bins[of], minlength=len(self.edges))
        total = np.bincount(self._bins[of], self._rewards[of], minlength=len(self.edges))
        return known, np.where(known > 0, total / np.maximum(known, 1), np.nan)


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


SETTINGS = {
    Cap.TOKENS: "rollout.sampling.max_new_tokens",
    Cap.SECONDS: "rollout.max_seconds",
    Cap.TURNS: "environment.max_turns",
}
_LONGER = 1.2  # times as long as what is kept: below, dropping does not go by length
_CERTAIN = 2.0  # standard errors


def tell_dropping(table: DropTable) -> list[str]:
    """A line on dropping, then one for each cap that cut, then one on groups without signal."""
    rows = {row.reason: row for row in table.rows}
    lines = [_on_dropping(table)]
    lines += [_on_cap(rows[f"cap: {cap}"], cap, table) for cap in CAPS if f"cap: {cap}" in rows]
    if DropReason.NO_SIGNAL in rows:
        lines.append(_on_signal(rows[DropReason.NO_SIGNAL], table))
    return lines


def _on_dropping(table: DropTable) -> str:
    row, kept = table.any, table.kept
    if not row.count:
        return "Nothing was dropped for its length, age or failures: no long reasoning is lost this way."
    if not row.length or not kept.length:
        return f"{row.share:.2%} were dropped, of lengths that cannot be compared with what is kept."
    times = row.length / kept.length
    at_least = "at least " if row.unfinished else ""
    words = f"{row.share:.2%} were dropped, {at_least}{times:.1f}x as long as what is kept"
    if times < _LONGER and not row.unfinished:
        return f"{words}: dropping does not go by length."
    if row.known < MIN_KNOWN or row.reward is None:
        return (
            f"{words}; the rewards of only {row.known} are known, so whether this trains away long reasoning is"
            " not."
        )
    if row.expected is None:
        return (
            f"{words}; the {row.known} whose reward is known {_right(row.reward, table)}, and nothing so long is"
            " kept: what they could teach is lost."
        )
    compared = (
        f"{words}; the {row.known} whose reward is known {_right(row.reward, table)}, kept ones of the same length"
        f" {_right(row.expected, table)}"
    )
    if row.expected - row.reward > _CERTAIN * row.error:
        return f"{compared}: what is dropped is worse, and little is lost."
    if times < _LONGER:
        return f"{compared}: as good, and hardly longer."
    return f"{compared}: dropping trains away long reasoning."


def _on_cap(row: DropRow, cap: str, table: DropTable) -> str:
    words = f"The cap on {cap} ({SETTINGS[Cap(cap)]}) cut {row.share:.2%}, which were trained on as they were"
    if row.reward is None:
        return f"{words}."
    rest = f"the kept {_right(table.kept.reward or 0.0, table)}"
    return f"{words}; they {_right(row.reward, table)}, {rest}."


def _on_signal(row: DropRow, table: DropTable) -> str:
    trained = table.ended - sum(other.count for other in table.rows if not other.reason.startswith("cap"))
    words = f"Groups without signal took {row.share:.1%}; they {_right(row.reward or 0.0, table)}"
    return f"{words}, and nothing of them was trained on ({trained:,} trajectories were)."


def _right(reward: float, table: DropTable) -> str:
    return f"have a mean reward of {reward:.3g}" if table.graded else f"were right in {reward:.0%}"
