"""Token sampling of the embedded engine: one uniform number per token, through the inverse of the CDF.

The scheduler calls it once a step. The number is a hash of the request's seed and the token's position in the
response. A token therefore depends neither on its batch nor on earlier interruptions
(`tests/engines/engine_conformance.py`).
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laminar_py.engines.local.attention import LOG2_E
from laminar_py.records.codec import BoolArray, FloatArray
from laminar_py.records.pieces import SamplingMask

Seeds = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FRACTION_BITS = 23  # so that u times a sum in fp32 stays below the sum
NEAR = 1e-5  # of a boundary between two tokens, where rounding of logits may decide between them


def uniforms(seeds: Seeds, positions: npt.NDArray[np.int64]) -> FloatArray:
    """Uniform numbers in [0, 1) for tokens at `positions [B]` of responses with hashed `seeds [B]`, as `[B]`."""
    bits = hash_seeds(seeds + positions.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(64 - _FRACTION_BITS)).astype(np.float32) * np.float32(2.0**-_FRACTION_BITS)


def hash_seeds(x: Seeds) -> Seeds:
    """Hash integers, so that neighbours give unrelated numbers: SplitMix64 (Steele, Lea, Flood 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def is_near(edges: FloatArray, uniform: FloatArray) -> BoolArray:
    """Return which numbers in `uniform [B]` lie within `NEAR` of a boundary to another token, as `[B]`.

    A boundary lies between two tokens of positive probability; `edges [B, 3]` are as in `Drawn`.
    """
    inner, total = edges[:, :2], edges[:, 2:]
    near = (np.abs(inner - uniform[:, None] * total) < NEAR * total) & (inner > 0) & (inner < total)
    return near[:, 0] | near[:, 1]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled token for each of B rows."""

    ids: Tensor  # [B]
    logprobs: Tensor  # [B] log-softmax(logits / temperature), over the recorded `mask` or the whole vocabulary
    mask: SamplingMask | None  # of B rows
    edges: Tensor | None = None  # [B, 3] probability of all tokens before it, with itself, and of all tokens


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sampling parameters of a batch, e.g. `PLAIN`. A field is None if no row needs it, to save its cost."""

    temperatures: Tensor | None = None  # [B, 1] 1 on greedy rows; None: all are 1
    greedy: Tensor | None = None  # [B] True where the temperature is 0
    cut: "_Cut | None" = None  # rows with a top-k, a top-p or a min-p

    @classmethod
    def build(
        cls, temperatures: FloatArray, *, top_k: npt.NDArray[np.int64], top_p: FloatArray, min_p: FloatArray
    ) -> Self:
        """Build from the settings of each row, `[B]`, with the meaning of `SamplingParams`."""
        greedy: BoolArray = temperatures == 0
        divisors = torch.from_numpy(np.where(greedy, np.float32(1), temperatures))
        rows, cut = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0)), None
        if rows.size:
            bounds = np.where(top_k > 0, top_k, np.iinfo(np.int64).max)
            columns = (bounds[rows, None], top_p[rows, None], min_p[rows, None])
            cut = _Cut(torch.from_numpy(rows), *map(torch.from_numpy, columns))
        return cls(
            temperatures=divisors[:, None],
            greedy=torch.from_numpy(greedy) if greedy.any() else None,
            cut=cut,
        )

    def draw(self, logits: Tensor, uniform: Tensor, *, recorded: bool = False, with_edges: bool = False) -> Drawn:
        """Sample a token for each row of `logits [B, V]` by `uniform [B]`; if `recorded`, also its mask.

        `with_edges` adds the edges of each token for `is_near`, 0 for greedy rows.
        """
        if self.temperatures is not None:
            logits = logits / self.temperatures
        logprobs = torch.log_softmax(logits, -1)
        probabilities = torch.exp2(logprobs * LOG2_E)
        if self.cut is not None:
            self.cut.apply(probabilities)
        mask = _mask(probabilities) if recorded else None
        cumulated = probabilities.cumsum_(-1)
        # The first entry above the target has a positive probability, even after a cut.
        ids = torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)
        # clamp for NaN logits, which the scheduler finds by their log-probabilities
        ids.clamp_(max=logits.shape[-1] - 1)
        if self.greedy is not None:
            ids[self.greedy] = logprobs[self.greedy].argmax(-1, keepdim=True)
        chosen = logprobs.gather(1, ids)[:, 0]
        edges = self._edges(cumulated, ids) if with_edges else None
        return Drawn(ids[:, 0], chosen - cumulated[:, -1].log() if recorded else chosen, mask, edges)

    def _edges(self, cumulated: Tensor, ids: Tensor) -> Tensor:
        """Return the `[B, 3]` edges of tokens `ids [B, 1]` among `cumulated [B, V]` probabilities."""
        last = torch.full_like(ids, cumulated.shape[-1] - 1)
        edges = cumulated.gather(1, torch.cat([(ids - 1).clamp_(min=0), ids, last], 1))
        return edges if self.greedy is None else edges.masked_fill_(self.greedy[:, None], 0)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The C rows of a batch with a top-k, top-p or min-p."""

    rows: Tensor  # [C]
    top_k: Tensor  # [C, 1] the largest integer for a row without top-k
    top_p: Tensor  # [C, 1]
    min_p: Tensor  # [C, 1]

    def apply(self, probabilities: Tensor) -> None:
        """Set `probabilities [B, V]` to zero in place outside each row's cut.

        A token stays if it is in the top k, in the smallest set with mass `top_p`, and at least `min_p` times as
        probable as the most probable token. Each bound applies to the whole distribution.
        """
        ordered, order = probabilities[self.rows].sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        rank = torch.arange(ordered.shape[-1])
        likely = ordered >= self.min_p * ordered[:, :1]
        inside = ordered * ((rank < self.top_k) & (before < self.top_p) & likely)
        probabilities[self.rows] = torch.zeros_like(inside).scatter_(-1, order, inside)


def _mask(probabilities: Tensor) -> SamplingMask:
    """Sampling mask of the tokens with positive probability in `probabilities [B, V]`."""
    rows, ids = (probabilities > 0).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(probabilities))
    return SamplingMask(counts.cpu().numpy().astype(np.int32), ids.cpu().numpy().astype(np.int32))


PLAIN = Sampler()
