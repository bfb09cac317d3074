"""Operations of a step, by a formula, and the peak of its devices: for MFU. Called by `step` and the benchmark.

Model FLOPs of a sequence of L tokens, forward and backward: `6 N_active L + 6 layers width L^2`.

- `N_active` counts the weights of matrix products that a token goes through: k of E experts, the output embedding
  once, no lookup and no norm. Each costs 2 FLOPs forward, 2 for the gradient of what came in, and 2 for its own,
  which a frozen weight (under adapters) does not have.
- Attention is causal: `width` is heads times their size, and scores and values cost `L^2 width` each, forward.
- What is computed again (activations, logits in chunks, scores in the backward pass) is not counted, and neither
  are passes without a gradient: a reference model, a proximal policy, an estimate of a partition function.

Source: Chowdhery et al. 2022 (PaLM), appendix B, with causal attention counted once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from laminar_py.learner.packing.balance import attention_share, sequence_cost

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

    per_token: float  # FLOPs of its matrix products
    attention_share: float  # attention over L^2 tokens in units of `per_token`

    def flops(self, lengths: Iterable[int]) -> float:
        """Model FLOPs of sequences of these lengths, forward and backward."""
        share = self.attention_share
        return self.per_token * sum(sequence_cost(length, attention_share=share) for length in lengths)


def training_cost(model: PreTrainedModel) -> TrainingCost:
    """FLOPs of training a Hugging Face decoder, sharded or not."""
    config = model.config
    per_token = _per_token(model)
    share = attention_share(
        hidden_size=_head_size(config) * config.num_attention_heads,
        num_layers=config.num_hidden_layers,
        num_parameters=round(per_token / 6),
    )
    return TrainingCost(per_token, share)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOPS of a device; None where they are not known, which nobody should guess."""
    if device.type != "cuda":
        return None
    return PEAKS.get(torch.cuda.get_device_name(device).removeprefix("NVIDIA "))


def _head_size(config: PretrainedConfig) -> int:
    """Mean of what a head compares and what it sums up, which latent attention has apart."""
    compared: int | None = getattr(config, "qk_head_dim", None)
    if compared is not None:
        return int(compared + config.v_head_dim) // 2
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _per_token(model: PreTrainedModel) -> float:
    head = model.get_output_embeddings().weight
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - {id(head)}
    total = 0.0
    for weight in model.parameters():
        if weight.ndim >= 2 and id(weight) not in lookups:
            total += (6 if weight.requires_grad else 4) * weight.numel() * _share_used(weight, model.config)
    return total


def _share_used(weight: nn.Parameter, config: PretrainedConfig) -> float:
    """Share of the experts that a weight stacks, [E, ...], that a token goes to; 1 for any other weight."""
    chosen: int | None = getattr(config, "num_experts_per_tok", None)
    return chosen / weight.shape[0] if weight.ndim == 3 and chosen else 1.0
