"""Stands in for SGLang's kernels, which exist for GPUs and for CPUs with AMX: names import, calls raise.

It registers no `torch.ops.sgl_kernel`, so SGLang finds no AMX and takes its own implementations in torch.
"""

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0+stub"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a stub: this environment has no GPU kernels")

    return missing
