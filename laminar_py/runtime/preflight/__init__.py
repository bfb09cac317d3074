"""Checks before a run, and GPUs by name."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.runtime.preflight.doctor import Finding as Finding
    from laminar_py.runtime.preflight.gpus import Gpu as Gpu
    from laminar_py.runtime.preflight.gpus import gpu_named as gpu_named
    from laminar_py.runtime.preflight.gpus import read_group as read_group
    from laminar_py.runtime.preflight.inputs import check_inputs as check_inputs
    from laminar_py.runtime.preflight.inputs import check_shared_memory as check_shared_memory
    from laminar_py.runtime.preflight.inputs import prepare as prepare
    from laminar_py.runtime.preflight.memory import COMMAND_TIMEOUT_S as COMMAND_TIMEOUT_S
    from laminar_py.runtime.preflight.memory import SPARE_SHARE as SPARE_SHARE
    from laminar_py.runtime.preflight.memory import Parts as Parts
    from laminar_py.runtime.preflight.memory import engine_memory as engine_memory
    from laminar_py.runtime.preflight.memory import learner_memory as learner_memory
    from laminar_py.runtime.preflight.model_shape import BF16_BYTES as BF16_BYTES
    from laminar_py.runtime.preflight.model_shape import ModelShape as ModelShape
    from laminar_py.runtime.preflight.model_shape import kv_token_bytes as kv_token_bytes
    from laminar_py.runtime.preflight.model_shape import read_shape as read_shape
else:
    __getattr__ = public_names(__name__)
