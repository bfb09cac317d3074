"""Backends of inference."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.engines.base import EngineJob as EngineJob
    from laminar_py.engines.base import RequestScheduler as RequestScheduler
    from laminar_py.engines.base import StreamingEngine as StreamingEngine
    from laminar_py.engines.checks import response_limit as response_limit
    from laminar_py.engines.checks import weights_layout as weights_layout
    from laminar_py.engines.model_sizes import read_sizes as read_sizes
    from laminar_py.engines.model_sizes import served_dtype as served_dtype
else:
    __getattr__ = public_names(__name__)
