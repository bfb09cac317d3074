"""Stands in for torchvision, which a server of text never calls: names import, and raise when they are used."""

import stub_modules

__version__ = "0.28.0"


class _Names(type):
    def __getattr__(cls, name: str) -> str:  # members of enumerations, such as InterpolationMode.BICUBIC
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Missing(metaclass=_Names):
    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("torchvision is a stub: this environment serves text only")


def __getattr__(name: str) -> type[_Missing]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing


stub_modules.install("torchvision", lambda _module, _name: _Missing)
