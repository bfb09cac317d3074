"""RMS norms as one kernel each, which transformers computes in ten. Called by `model`, for a GPU.

Invariant: a norm is replaced only where a trial says that it computes the same; the result is rounded once instead
of twice.
"""

import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

NAMES = ("variance_epsilon", "eps")  # under which layers keep what is added to the mean square
ROWS, TOLERANCE = 4, 1e-5  # of a trial, in fp32


def fuse_norms(model: nn.Module) -> int:
    """Have all RMS norms of a model computed by torch's own; the number of those that are."""
    known: dict[tuple[type, torch.Size], bool] = {}
    fused = 0
    for module in model.modules():
        epsilon = _epsilon(module)
        if epsilon is None:
            continue
        kind = (type(module), _weight(module).shape)
        if kind not in known:
            known[kind] = _is_plain(module, epsilon)
        if known[kind]:
            module.forward = types.MethodType(_fused(epsilon), module)
            fused += 1
    return fused


def _epsilon(module: nn.Module) -> float | None:
    """Epsilon of an RMS norm that has one weight for each channel and nothing else; None for another module."""
    named = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    if not type(module).__name__.endswith("RMSNorm") or set(named) != {"weight"} or named["weight"].dim() != 1:
        return None
    return next((float(getattr(module, name)) for name in NAMES if hasattr(module, name)), None)


def _is_plain(module: nn.Module, epsilon: float) -> bool:
    """True if it multiplies by its weight as it is, and adds epsilon where torch does; that may have no values."""
    generator = torch.Generator().manual_seed(0)
    (size,) = _weight(module).shape
    weight = torch.randn(size, generator=generator)
    states = torch.randn(ROWS, size, generator=generator)
    states[0] *= epsilon**0.5
    try:
        found = functional_call(module, {"weight": weight}, (states,))
    except (TypeError, RuntimeError):  # it takes more than its input
        return False
    expected = F.rms_norm(states, (size,), weight, epsilon)
    return isinstance(found, Tensor) and torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _fused(epsilon: float) -> Callable[[nn.Module, Tensor], Tensor]:
    """A forward that reads the weight anew, since sharding replaces it."""

    def forward(module: nn.Module, hidden_states: Tensor) -> Tensor:
        weight = _weight(module)
        return F.rms_norm(hidden_states, weight.shape, weight, epsilon)

    return forward


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor), f"{type(module).__name__} has a weight"
    return weight
