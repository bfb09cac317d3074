"""Drops by filters, caps and timeouts, by length and by reward: does dropping train away long reasoning?

A trajectory is judged when it has ended, by the length that it had then. Groups without signal are a filter of
their own: kept, where other reasons are judged.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laminar_py.observe.analytics.read.columns import CAPS, REASONS, Trajectories
from laminar_py.records.codec import BoolArray
from laminar_py.records.trajectory import DropReason, Status

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
        self._unfinished = ended.finish < 0
        if edges is None:
            lengths = self._lengths
            edges = np.unique(np.quantile(lengths, _QUANTILES, method="higher")) if len(lengths) else lengths
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
        begun = self._lengths[mask & (self._lengths > 0)]
        return DropRow(
            reason=reason,
            count=count,
            share=count / max(1, len(mask)),
            unfinished=int((mask & self._unfinished).sum()),
            length=float(begun.mean()) if len(begun) else 0.0,
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

    def _count(self, mask: BoolArray) -> npt.NDArray[np.int64]:
        """How many are in each bin."""
        return np.bincount(self._bins[mask], minlength=len(self.edges))

    def _rewards_of(self, mask: BoolArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """How many rewards of each bin are known, and their mean; NaN for none."""
        of = mask & self._known
        known = np.bincount(self._bins[of], minlength=len(self.edges))
        total = np.bincount(self._bins[of], self._rewards[of], minlength=len(self.edges))
        return known, np.where(known > 0, total / np.maximum(known, 1), np.nan)
