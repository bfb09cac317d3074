"""An engine that emulates the times of GPUs."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.engines.emulated.backend import open_engine as open_engine
    from laminar_py.engines.emulated.engine import EmulatedEngine as EmulatedEngine
    from laminar_py.engines.emulated.engine import hash_weights as hash_weights
    from laminar_py.engines.emulated.responses import Responses as Responses
    from laminar_py.engines.emulated.turns import environments_of as environments_of
else:
    __getattr__ = public_names(__name__)
