"""Emulated fp8 of the embedded engine: weights rounded to e4m3 with a scale for each block, computed in its type.

`weights._Folder` calls it for each matrix of a layer as the files have it: projections of attention, MLP and
experts. Embedding, head, router and norms keep their type, as in fp8 checkpoints of SGLang. Activations and KV
cache keep theirs, too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
LARGEST = 448.0  # of e4m3


def is_quantized(name: str) -> bool:
    """Whether fp8 rounds the tensor of this Hugging Face name."""
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def rounded(weight: Tensor) -> Tensor:
    """Round `weight [out, in]` to bf16, then to e4m3 in blocks of 128 x 128, smaller at edges; keeps its dtype.

    The scale of a block is its largest magnitude over 448, 1 for a block of zeros.
    """
    rows, columns = weight.shape
    padding = (0, -columns % BLOCK, 0, -rows % BLOCK)
    padded = F.pad(weight.to(torch.bfloat16).float(), padding)
    blocks = padded.view(-1, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    codes = (blocks / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scales).view_as(padded)[:rows, :columns].contiguous().to(weight.dtype)
