"""Metrics of a step: sums over its tokens by staleness, and its FLOPs with the peak of the devices, for MFU.

`step` owns a `TokenSums`, and benchmarks count FLOPs too. Until the end each metric is a sum, a count or a
maximum, so that microbatches and ranks only split it (`tests/learner/test_metrics.py`).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.learner.distributed import Ranks
from laminar_py.learner.losses.objectives import LossInputs, clipped_ratio, k3
from laminar_py.learner.packing.balance import attention_share
from laminar_py.records.columns import REFERENCE_LOGPROBS
from laminar_py.records.metrics import Mismatch, TokenMetrics

BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")  # learner steps since the weights that drew a token
EDGES = (1, 2, 3, 5, 9)
GAPS = 64  # bins of |engine - learner| log-probability, by its logarithm
GAP_FLOOR, GAP_TOP = -7.0, 1.0  # from 1e-7 to 10 nats


class TokenSums:
    """Sums over the trained tokens of a step, by staleness: `add` microbatches, `reduce` over ranks, then read."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(BUCKETS), len(_COLUMNS), dtype=torch.float64, device=device)
        # gap: |engine - learner| log-probability of a token with staleness 0, before the step's first update
        self._gap_counts = torch.zeros(GAPS, dtype=torch.float64, device=device)  # tokens by bin of the gap
        self._gap_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._largest_gap = torch.zeros((), dtype=torch.float64, device=device)
        self._peaks = torch.zeros(len(BUCKETS), len(_PEAKS), dtype=torch.float64, device=device)
        self._edges = torch.tensor(EDGES, device=device)

    def add(
        self, inputs: LossInputs, *, entropy: Tensor, settings: AlgorithmConfig, at_step_start: bool = True
    ) -> None:
        """Add the N trained tokens of one microbatch; `entropy` is [N].

        `at_step_start`: no update of the step has changed the weights, so that gaps of fresh tokens are measured.
        """
        logprobs, proximal = inputs.logprobs.detach(), inputs.proximal
        ratio, gap = clipped_ratio(inputs, settings), (logprobs - inputs.behaviour).double()
        low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
        reference = inputs.columns.get(REFERENCE_LOGPROBS)
        averaged = {
            "entropy": entropy.detach(),
            "ratio": ratio,
            "ratio_deviation": (ratio - 1.0).abs(),
            "clip_fraction": (ratio < low) | (ratio > high),
            "importance_capped_fraction": ratio > (settings.importance_cap or torch.inf),
            "kl_behaviour_k1": -gap,
            "kl_behaviour_k3": gap.expm1() - gap,
            "kl_proximal_k1": proximal - logprobs,
            "kl_proximal_k3": k3(proximal, logprobs),
            "kl_reference_k3": torch.zeros_like(logprobs) if reference is None else k3(logprobs, reference),
            "advantage_mean": inputs.advantages,
            "advantage_squares": inputs.advantages.double().square(),
        }
        summed = {
            "tokens": torch.ones_like(logprobs),
            "weight": inputs.weights,
            "importance": gap.exp(),
            "importance_squares": (2 * gap).exp(),
        }
        columns = [*(inputs.weights * averaged[name] for name in _MEANS), *(summed[name] for name in _COUNTS)]
        bucket = torch.bucketize(inputs.staleness, self._edges, right=True)
        self._sums.index_add_(0, bucket, torch.stack([column.double() for column in columns], dim=1))
        peaks = torch.stack([ratio, inputs.advantages.abs()], dim=1)  # as in `_PEAKS`
        self._peaks.scatter_reduce_(0, bucket[:, None].expand_as(peaks), peaks.double(), "amax")
        fresh_gaps = gap[bucket == 0].abs()  # of tokens that engine and learner computed with the same weights
        if at_step_start and len(fresh_gaps):
            self._gap_sum += fresh_gaps.sum()
            place = (fresh_gaps.clamp(min=1e-30).log10() - GAP_FLOOR) / (GAP_TOP - GAP_FLOOR) * GAPS
            self._gap_counts += torch.bincount(place.long().clamp(0, GAPS - 1), minlength=GAPS)
            self._largest_gap = torch.maximum(self._largest_gap, fresh_gaps.max())

    def merge(self, other: "TokenSums") -> None:
        """Add the sums of `other`, and keep the larger maxima."""
        self._sums += other._sums
        self._gap_counts += other._gap_counts
        self._gap_sum += other._gap_sum
        self._largest_gap = torch.maximum(self._largest_gap, other._largest_gap)
        self._peaks = torch.maximum(self._peaks, other._peaks)

    def reduce(self, ranks: Ranks) -> None:
        """Replace each sum by its sum over ranks, and each maximum by its maximum over ranks. Collective."""
        for tensor in (self._sums, self._gap_counts, self._gap_sum):
            ranks.reduce_tensor(tensor)
        for tensor in (self._largest_gap, self._peaks):
            ranks.reduce_tensor(tensor, dist.ReduceOp.MAX)

    def tokens(self) -> TokenMetrics:
        """Metrics of all trained tokens."""
        return _metrics(self._sums.sum(0), self._peaks.amax(0))

    def by_staleness(self) -> dict[str, TokenMetrics]:
        """Token metrics for each bucket that has tokens, e.g. {"0": ..., "3-4": ...}."""
        rows = zip(BUCKETS, self._sums, self._peaks, strict=True)
        return {name: _metrics(row, peaks) for name, row, peaks in rows if row[_COLUMNS.index("tokens")] > 0}

    def mismatch(self) -> Mismatch:
        """Mean, 99th percentile (the upper edge of its bin) and maximum of the gaps; NaN without any gap."""
        total = float(self._gap_counts.sum())
        if total == 0:
            return Mismatch()
        place = int((self._gap_counts.cumsum(0) < 0.99 * total).sum()) + 1
        p99 = 10.0 ** (GAP_FLOOR + place / GAPS * (GAP_TOP - GAP_FLOOR))
        largest = float(self._largest_gap)
        return Mismatch(float(self._gap_sum) / total, min(p99, largest), largest)


_MEANS = (  # means with the loss weights, named as in `TokenMetrics` except `advantage_squares`
    "entropy",
    "ratio",
    "ratio_deviation",
    "clip_fraction",
    "importance_capped_fraction",
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
    """Compute metrics from `row`, sums over tokens in the order of `_COLUMNS`, and `peaks`, as in `_PEAKS`."""
    sums = dict(zip(_COLUMNS, row.tolist(), strict=True))
    if not sums["tokens"]:
        return TokenMetrics()
    means = {name: sums[name] / (sums["weight"] or 1.0) for name in _MEANS}
    variance = means.pop("advantage_squares") - means["advantage_mean"] * means["advantage_mean"]
    importance = sums["importance"] * sums["importance"]  # a power of Python's would raise where it overflows
    return TokenMetrics(
        num_tokens=int(sums["tokens"]),
        effective_share=importance / (sums["tokens"] * (sums["importance_squares"] or 1.0)),
        advantage_std=max(variance, 0.0) ** 0.5,  # in this order NaN stays NaN
        **means,
        **dict(zip(_PEAKS, peaks.tolist(), strict=True)),
    )


# ---- FLOPs of a step
#
# Model FLOPs for L tokens in one sequence, forward and backward: `6 N_active L + 6 layers width L^2`.
#
# - `N_active` counts the weights of matrix products that a token uses: k of E experts, the output embedding once,
#   no lookup and no norm. Each weight costs 2 FLOPs forward, 2 for the gradient of its input, and 2 for its own
#   gradient, which a frozen weight (under adapters) does not have.
# - Attention is causal: `width` is heads times their size, and scores and values cost `L^2 width` each, forward.
# - Recomputation (activations, logits in chunks, scores in the backward pass) does not count. Passes without a
#   gradient do not count either: of a reference model, a proximal policy, an estimate of a partition function.
#
# Source: Chowdhery et al. 2022 (PaLM), appendix B, with causal attention counted once.

# Dense bf16 FLOPS, half of the figure with sparsity that the data sheets print. NVIDIA, in TFLOPS with sparsity:
# "A100 Tensor Core GPU" (624, SXM and PCIe), "H100 Tensor Core GPU" (1,979 SXM, 1,671 NVL; 1,513 PCIe in the sheet
# of 2022), "H200 Tensor Core GPU" (1,979 SXM, 1,671 NVL), "HGX B200" (36,000 for eight). A slice of a GPU (MIG)
# has another name, and is not here.
PEAKS = {
    "A100-SXM4-40GB": 312e12,
    "A100-SXM4-80GB": 312e12,
    "A100-PCIE-40GB": 312e12,
    "A100 80GB PCIe": 312e12,
    "H100 80GB HBM3": 989.5e12,
    "H100 PCIe": 756.5e12,
    "H100 NVL": 835.5e12,
    "H200": 989.5e12,
    "H200 NVL": 835.5e12,
    "B200": 2250e12,
}


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """FLOPs of training one model, e.g. `TrainingCost(6 * 7.6e9, 1.3e-5)`."""

    per_token: float  # FLOPs of a token's matrix products, forward and backward
    attention_share: float  # attention costs `attention_share * L^2 * per_token` FLOPs for L tokens

    def flops(self, tokens: float, squares: float) -> float:
        """Model FLOPs, forward and backward, for sequences of so many tokens, with this sum of squared lengths."""
        return self.per_token * (tokens + self.attention_share * squares)


def training_cost(model: PreTrainedModel) -> TrainingCost:
    """Compute the training FLOPs of a Hugging Face decoder, sharded or not."""
    config = model.config
    per_token = _flops_per_token(model)
    share = attention_share(
        hidden_size=_head_size(config) * config.num_attention_heads,
        num_layers=config.num_hidden_layers,
        num_parameters=round(per_token / 6),
    )
    return TrainingCost(per_token, share)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOPS of a device; None for a device that is not in `PEAKS`, instead of a guess."""
    if device.type != "cuda":
        return None
    return PEAKS.get(torch.cuda.get_device_name(device).removeprefix("NVIDIA "))


def _head_size(config: PretrainedConfig) -> int:
    """Size of an attention head: the mean of its query and value sizes, which differ in latent attention."""
    compared: int | None = getattr(config, "qk_head_dim", None)
    if compared is not None:
        return int(compared + config.v_head_dim) // 2
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _flops_per_token(model: PreTrainedModel) -> float:
    """Return FLOPs of the linear layers per token: 6 for each trained weight that the token uses, 4 if frozen."""
    head = model.get_output_embeddings().weight
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - {id(head)}
    chosen: int | None = getattr(model.config, "num_experts_per_tok", None)
    total = 0.0
    for weight in model.parameters():
        if weight.ndim >= 2 and id(weight) not in lookups:
            share = chosen / weight.shape[0] if weight.ndim == 3 and chosen else 1.0  # of stacked experts
            total += (6 if weight.requires_grad else 4) * weight.numel() * share
    return total
