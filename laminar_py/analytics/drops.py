"""What filters, caps and timeouts dropped, by length and by reward: does dropping train away long reasoning?

A trajectory is judged when it has ended; its length is what it had then or, if a deadline dropped it and it was
probed, what it had in the end. Groups without signal are a filter of their own: they say nothing of length by
themselves, so they count as kept where other reasons are judged.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laminar_py.analytics.columns import CAPS, REASONS, STATUSES, Trajectories
from laminar_py.analytics.scan import Probes
from laminar_py.codec import BoolArray
from laminar_py.types import DropReason, Status

ANY = "any but no_signal"
MIN_KNOWN = 20  # rewards without which nothing is said of them

_QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_APART = (DropReason.NO_SIGNAL, DropReason.RUN_ENDED)


@dataclass(frozen=True, slots=True)
class Bin:
    """Trajectories of one range of lengths, e.g. `Bin(0.12, 30, 0.4)`; None: no reward of any is known."""

    share: float  # of all that ended in this range
    known: int  # whose reward is known
    reward: float | None  # their mean


@dataclass(frozen=True, slots=True)
class DropRow:
    """What one reason dropped, or one cap cut."""

    reason: str
    count: int
    share: float  # of all that ended
    unfinished: int  # whose length in the end nobody knows: they were to be longer
    length: float  # mean tokens of those that had begun
    known: int  # whose reward is known
    reward: float | None  # their mean
    expected: float | None  # mean reward of kept ones of the same lengths
    error: float  # standard error of `reward`
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class DropTable:
    """All rows over the same bins of length; `kept` reached the learner, or only lacked signal."""

    edges: tuple[int, ...]  # longest response of each bin
    ended: int
    kept: DropRow
    any: DropRow  # all reasons but those that stand apart
    rows: tuple[DropRow, ...]  # of reasons and caps that occurred
    graded: bool  # rewards other than 0 and 1 occur


def table_of_drops(trajectories: Trajectories, probes: Probes) -> DropTable:
    """Of the trajectories that have ended so far."""
    t, lengths, rewards, open_ended = _with_probes(trajectories, probes)
    dropped = t.is_status(Status.DROPPED)
    apart = np.logical_or.reduce([t.dropped_for(reason) for reason in _APART])
    judge = _Judge(lengths, rewards, open_ended, kept=~dropped | t.dropped_for(DropReason.NO_SIGNAL))
    rows = [judge.row(str(reason), t.dropped_for(reason)) for reason in REASONS if reason not in _APART]
    rows += [judge.row(f"cap: {cap}", ~dropped & (t.cap == code)) for code, cap in enumerate(CAPS)]
    trained = _Judge(lengths, rewards, open_ended, kept=~dropped, edges=judge.edges)
    rows += [trained.row(str(reason), t.dropped_for(reason)) for reason in _APART]
    known = rewards[~np.isnan(rewards)]
    return DropTable(
        tuple(judge.edges.tolist()),
        len(t),
        judge.row("kept", judge.kept),
        judge.row(ANY, dropped & ~apart),
        tuple(row for row in rows if row.count),
        bool(np.any((known != 0) & (known != 1))),
    )


def _with_probes(
    t: Trajectories, probes: Probes
) -> tuple[Trajectories, npt.NDArray[np.int64], npt.NDArray[np.float64], BoolArray]:
    """Those that have ended, their lengths and rewards as far as known, and which lengths are not final."""
    lengths, rewards = t.length.astype(np.int64), t.reward.astype(np.float64)
    open_ended = t.finish < 0
    places = np.searchsorted(t.number, probes.number)
    lengths[places], rewards[places], open_ended[places] = probes.length, probes.reward, False
    ended = t.is_status(Status.CONSUMED) | (t.status == STATUSES.index(Status.DROPPED))
    return t.where(ended), lengths[ended], rewards[ended], open_ended[ended]


class _Judge:
    """Compares what was dropped with what was kept, bin by bin."""

    def __init__(
        self,
        lengths: npt.NDArray[np.int64],
        rewards: npt.NDArray[np.float64],
        open_ended: BoolArray,
        *,
        kept: BoolArray,
        edges: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.kept = kept
        self._lengths, self._rewards, self._open_ended = lengths, rewards, open_ended
        if edges is None:
            edges = np.unique(np.quantile(lengths, _QUANTILES, method="higher")) if len(lengths) else lengths
        self.edges = edges
        self._bins = np.searchsorted(self.edges, lengths)
        self._num = np.bincount(self._bins, minlength=len(edges))
        self._known = ~np.isnan(rewards)
        _, self._kept_reward = self._rewards_of(kept)

    def row(self, reason: str, mask: BoolArray) -> DropRow:
        """Of those in `mask` [N]."""
        count = int(mask.sum())
        in_bins = np.bincount(self._bins[mask], minlength=len(self.edges))
        known_in, reward_in = self._rewards_of(mask)
        rewards = self._rewards[mask & self._known]
        comparable = (known_in > 0) & ~np.isnan(self._kept_reward)
        weights = np.where(comparable, known_in, 0)
        begun = mask & (self._lengths > 0)
        return DropRow(
            reason,
            count,
            count / max(1, len(mask)),
            int((mask & self._open_ended).sum()),
            float(self._lengths[begun].mean()) if begun.any() else 0.0,
            len(rewards),
            float(rewards.mean()) if len(rewards) else None,
            float(np.nansum(weights * self._kept_reward) / weights.sum()) if weights.any() else None,
            float(rewards.std() / np.sqrt(len(rewards))) if len(rewards) else 0.0,
            tuple(
                Bin(part / max(1, whole), known, reward if known else None)
                for part, whole, known, reward in zip(
                    in_bins.tolist(), self._num.tolist(), known_in.tolist(), reward_in.tolist(), strict=True
                )
            ),
        )

    def _rewards_of(self, mask: BoolArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """How many rewards of each bin are known, and their mean; NaN for none."""
        of = mask & self._known
        known = np.bincount(self._bins[of], minlength=len(self.edges))
        total = np.bincount(self._bins[of], self._rewards[of], minlength=len(self.edges))
        return known, np.where(known > 0, total / np.maximum(known, 1), np.nan)
