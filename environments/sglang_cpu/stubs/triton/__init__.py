"""Stands in for triton, which compiles for GPUs only (1 GB installed): kernels can be defined, never launched."""

import importlib
from collections.abc import Callable
from typing import NoReturn

import stub_modules

__version__ = "3.9.0"


class _Kernel:
    """A decorated kernel."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = getattr(function, "__doc__", None)
        self.__module__ = getattr(function, "__module__", __name__)

    def __getitem__(self, _grid: object) -> "_Kernel":
        return self

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"triton is a stub: kernel {self.__name__} cannot run without a GPU")


class _Anything(type):
    """Types, constants and decorators of `triton.language` and the like, as far as definitions mention them."""

    def __getattr__(cls, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: object, **options: object) -> object:
        decorates = len(args) == 1 and not options and callable(args[0])
        return args[0] if decorates else cls

    def __getitem__(cls, _key: object) -> "_Anything":
        return cls


class _Missing(metaclass=_Anything):
    pass


class Config:
    """A choice of launch options."""

    def __init__(self, kwargs: dict[str, object] | None = None, **options: object) -> None:
        self.kwargs = kwargs or {}
        self.__dict__.update(options)


def jit(function: Callable[..., object] | None = None, **_: object) -> object:
    """`@triton.jit`, with and without options."""
    return _Kernel if function is None else _Kernel(function)


def autotune(*_: object, **__: object) -> Callable[[object], object]:
    """`@triton.autotune(...)`: nothing to tune."""
    return lambda kernel: kernel


heuristics = autotune


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


def _attribute(module: str, name: str) -> object:
    if module == "triton.runtime":
        return importlib.import_module(f"{module}.{name}")
    if name == "active":  # triton.runtime.driver.active, in triton's own words where there is no GPU
        raise RuntimeError("0 active drivers ([]). There should only be one.")
    return type(name, (), {}) if name[0].isupper() else _Missing


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {}) if name[0].isupper() else importlib.import_module(f"triton.{name}")


stub_modules.install("triton", _attribute)
