"""Drawing of tokens in the embedded engine: one uniform number per token, through the inverse of the CDF.

Called by the scheduler once a step. Invariant: the number is a hash of the request's seed and of the token's
position in the response, so a token depends neither on the batch it is drawn in nor on interruptions before.
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


def hash_seeds(seeds: Seeds) -> Seeds:
    """Spread seeds that lie close together over all 64 bits."""
    return _splitmix(seeds)


def uniforms(seeds: Seeds, positions: npt.NDArray[np.int64]) -> FloatArray:
    """Numbers in [0, 1) for the tokens at `positions [B]` of responses with hashed `seeds [B]`, as `[B]`."""
    bits = _splitmix(seeds + positions.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(64 - _FRACTION_BITS)).astype(np.float32) * np.float32(2.0**-_FRACTION_BITS)


def _splitmix(x: Seeds) -> Seeds:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens of B rows, one for each."""

    ids: Tensor  # [B]
    logprobs: Tensor  # [B] log-softmax(logits / temperature), over `mask` if that is recorded, else over all
    mask: SamplingMask | None  # of B rows


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the rows of a batch are drawn, e.g. `PLAIN`; None where no row asks for it, so that it costs nothing."""

    temperatures: Tensor | None = None  # [B, 1] 1 on greedy rows; None: all are 1
    greedy: Tensor | None = None  # [B] True where the temperature is 0
    cut: "_Cut | None" = None  # rows with a top-k, a top-p or a min-p

    @classmethod
    def build(
        cls,
        temperatures: FloatArray,
        *,
        top_k: npt.NDArray[np.int64],
        top_p: FloatArray,
        min_p: FloatArray,
        device: torch.device,
    ) -> Self:
        """From the settings of each row, `[B]`, as in `SamplingParams`."""
        greedy: BoolArray = temperatures == 0
        divisors = torch.from_numpy(np.where(greedy, np.float32(1), temperatures))
        rows = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
        return cls(
            temperatures=divisors[:, None].to(device),
            greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
            cut=_Cut.build(rows, top_k[rows], top_p[rows], min_p[rows], device=device) if rows.size else None,
        )

    def draw(self, logits: Tensor, uniform: Tensor, *, recorded: bool = False) -> Drawn:
        """A token of each row; `logits [B, V]`, `uniform [B]`."""
        if self.temperatures is not None:
            logits = logits / self.temperatures
        logprobs = torch.log_softmax(logits, -1)
        probabilities = torch.exp2(logprobs * LOG2_E)
        if self.cut is not None:
            self.cut.apply(probabilities)
        mask = _mask(probabilities) if recorded else None
        cumulated = probabilities.cumsum_(-1)
        # The first entry above the target has a positive probability, whatever was cut before it.
        ids = torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)
        ids.clamp_(max=logits.shape[-1] - 1)  # where the logits are NaN; the scheduler sees the log-probabilities
        if self.greedy is not None:
            ids[self.greedy] = logprobs[self.greedy].argmax(-1, keepdim=True)
        chosen = logprobs.gather(1, ids)[:, 0]
        return Drawn(ids[:, 0], chosen - cumulated[:, -1].log() if recorded else chosen, mask)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Rows of a batch whose vocabulary is cut: C of them."""

    rows: Tensor  # [C]
    top_k: Tensor  # [C, 1] the largest integer where there is none
    top_p: Tensor  # [C, 1]
    min_p: Tensor  # [C, 1]

    @classmethod
    def build(
        cls,
        rows: npt.NDArray[np.int64],
        top_k: npt.NDArray[np.int64],
        top_p: FloatArray,
        min_p: FloatArray,
        *,
        device: torch.device,
    ) -> Self:
        bounds = np.where(top_k > 0, top_k, np.iinfo(np.int64).max)
        columns = (rows, bounds[:, None], top_p[:, None], min_p[:, None])
        return cls(*(torch.from_numpy(values).to(device) for values in columns))

    def apply(self, probabilities: Tensor) -> None:
        """Zeros outside the top k, the smallest set that holds `top_p`, and all from `min_p` of the largest up.

        Each is seen on the whole.
        """
        ordered, order = probabilities[self.rows].sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        likely = ordered >= self.min_p * ordered[:, :1]
        kept = ordered * ((rank < self.top_k) & (before < self.top_p) & likely)
        probabilities[self.rows] = torch.zeros_like(kept).scatter_(-1, order, kept)


def _mask(probabilities: Tensor) -> SamplingMask:
    """Mask of what has a probability, `[B, V]`."""
    rows, ids = (probabilities > 0).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(probabilities))
    return SamplingMask(counts.cpu().numpy().astype(np.int32), ids.cpu().numpy().astype(np.int32))


PLAIN = Sampler()
