"""An engine that emulates the times of GPUs."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.engines.emulated.backend import open_engine as open_engine
    from laminar_py.engines.emulated.engine import hash_weights as hash_weights
else:
    __getattr__ = public_names(__name__)
