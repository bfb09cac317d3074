"""Backends of inference."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.engines.model_sizes import read_sizes as read_sizes
    from laminar_py.engines.model_sizes import served_dtype as served_dtype
else:
    __getattr__ = public_names(__name__)
