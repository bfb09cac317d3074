"""Measures of a step's tokens: sums over microbatches and ranks, by staleness. Owned by `step`.

Invariant: everything is a sum, a count or a maximum until the end, so that microbatches and ranks only split it.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.learner.losses.divergence import k3
from laminar_py.learner.losses.objectives import Terms, clipped_ratio
from laminar_py.learner.ranks import Ranks
from laminar_py.records.columns import REFERENCE_LOGPROBS
from laminar_py.records.metrics import Mismatch, TokenMetrics

BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")  # learner steps since the weights that drew a token
EDGES = (1, 2, 3, 5, 9)
GAPS = 64  # bins of |engine - learner| log-probability, from 1e-7 to 10 nats
GAP_FLOOR, GAP_TOP = -7.0, 1.0


class TokenSums:
    """Sums over the trained tokens of a step."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(BUCKETS), len(_COLUMNS), dtype=torch.float64, device=device)
        self._gaps = torch.zeros(GAPS, dtype=torch.float64, device=device)
        self._gap_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)
        self._peaks = torch.zeros(len(BUCKETS), len(_PEAKS), dtype=torch.float64, device=device)
        self._edges = torch.tensor(EDGES, device=device)

    def add(
        self,
        terms: Terms,
        *,
        entropy: Tensor,
        settings: AlgorithmConfig,
        untouched: bool = True,
    ) -> None:
        """The N trained tokens of one microbatch; tensors are [N]. `untouched`: the step's first update."""
        own, proximal = terms.logprobs.detach(), terms.proximal
        ratio, gap = clipped_ratio(terms, settings), (own - terms.behaviour).double()
        low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
        reference = terms.columns.get(REFERENCE_LOGPROBS)
        means = {
            "entropy": entropy.detach(),
            "ratio": ratio,
            "ratio_deviation": (ratio - 1.0).abs(),
            "clip_fraction": (ratio < low) | (ratio > high),
            "truncated_fraction": ratio > (settings.importance_cap or torch.inf),
            "kl_behaviour_k1": -gap,
            "kl_behaviour_k3": gap.expm1() - gap,
            "kl_proximal_k1": proximal - own,
            "kl_proximal_k3": k3(proximal, own),
            "kl_reference_k3": torch.zeros_like(own) if reference is None else k3(own, reference),
            "advantage_mean": terms.advantages,
            "advantage_squares": terms.advantages.double().square(),
        }
        counts = {
            "tokens": torch.ones_like(own),
            "weight": terms.weights,
            "importance": gap.exp(),
            "importance_squares": (2 * gap).exp(),
        }
        columns = [*(terms.weights * means[name] for name in _MEANS), *(counts[name] for name in _COUNTS)]
        bucket = torch.bucketize(terms.staleness, self._edges, right=True)
        self._sums.index_add_(0, bucket, torch.stack([column.double() for column in columns], dim=1))
        peaks = torch.stack([ratio, terms.advantages.abs()], dim=1)  # as in `_PEAKS`
        self._peaks.scatter_reduce_(0, bucket[:, None].expand_as(peaks), peaks.double(), "amax")
        fresh = gap[bucket == 0].abs()  # what engine and learner computed with the same weights
        if untouched and len(fresh):
            self._gap_sum += fresh.sum()
            place = (fresh.clamp(min=1e-30).log10() - GAP_FLOOR) / (GAP_TOP - GAP_FLOOR) * GAPS
            self._gaps += torch.bincount(place.long().clamp(0, GAPS - 1), minlength=GAPS)
            self._largest = torch.maximum(self._largest, fresh.max())

    def merge(self, other: "TokenSums") -> None:
        """Count what `other` counted too."""
        self._sums += other._sums
        self._gaps += other._gaps
        self._gap_sum += other._gap_sum
        self._largest = torch.maximum(self._largest, other._largest)
        self._peaks = torch.maximum(self._peaks, other._peaks)

    def reduce(self, ranks: Ranks) -> None:
        """Sum over ranks. Collective."""
        for tensor in (self._sums, self._gaps, self._gap_sum):
            ranks.reduce(tensor)
        for tensor in (self._largest, self._peaks):
            ranks.reduce(tensor, dist.ReduceOp.MAX)

    def tokens(self) -> TokenMetrics:
        """Metrics of all trained tokens."""
        return _metrics(self._sums.sum(0), self._peaks.amax(0))

    def by_staleness(self) -> dict[str, TokenMetrics]:
        """Metrics of the tokens of each bucket that has some, e.g. {"0": ..., "3-4": ...}."""
        rows = zip(BUCKETS, self._sums, self._peaks, strict=True)
        return {name: _metrics(row, peaks) for name, row, peaks in rows if row[_COLUMNS.index("tokens")] > 0}

    def mismatch(self) -> Mismatch:
        """Gap between engine and learner; 0 without tokens that show it."""
        total = float(self._gaps.sum())
        if total == 0:
            return Mismatch()
        place = int((self._gaps.cumsum(0) < 0.99 * total).sum()) + 1
        p99 = 10.0 ** (GAP_FLOOR + place / GAPS * (GAP_TOP - GAP_FLOOR))
        largest = float(self._largest)
        return Mismatch(float(self._gap_sum) / total, min(p99, largest), largest)


_MEANS = (  # with the loss weights; `advantage_squares` and all others under the name of their figure
    "entropy",
    "ratio",
    "ratio_deviation",
    "clip_fraction",
    "truncated_fraction",
    "kl_behaviour_k1",
    "kl_behaviour_k3",
    "kl_proximal_k1",
    "kl_proximal_k3",
    "kl_reference_k3",
    "advantage_mean",
    "advantage_squares",
)
_COUNTS = ("tokens", "weight", "importance", "importance_squares")
_COLUMNS = (*_MEANS, *_COUNTS)
_PEAKS = ("ratio_max", "advantage_max")


def _metrics(row: Tensor, peaks: Tensor) -> TokenMetrics:
    sums = dict(zip(_COLUMNS, row.tolist(), strict=True))
    means = {name: sums[name] / (sums["weight"] or 1.0) for name in _MEANS}
    variance = means.pop("advantage_squares") - means["advantage_mean"] * means["advantage_mean"]
    importance = sums["importance"] * sums["importance"]  # a power of Python's would raise where it overflows
    return TokenMetrics(
        num_tokens=int(sums["tokens"]),
        effective_share=importance / ((sums["tokens"] or 1.0) * (sums["importance_squares"] or 1.0)),
        advantage_std=max(variance, 0.0) ** 0.5,  # in this order NaN stays NaN
        **means,
        **dict(zip(_PEAKS, peaks.tolist(), strict=True)),
    )
