"""Checks before a run."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.runtime.preflight.inputs import Problems as Problems
    from laminar_py.runtime.preflight.inputs import check_engine as check_engine
    from laminar_py.runtime.preflight.inputs import check_inputs as check_inputs
    from laminar_py.runtime.preflight.inputs import check_shared_memory as check_shared_memory
    from laminar_py.runtime.preflight.inputs import prepare as prepare
    from laminar_py.runtime.preflight.inputs import prompt_room as prompt_room
    from laminar_py.runtime.preflight.inputs import read_problems as read_problems
    from laminar_py.runtime.preflight.inputs import read_warm_start as read_warm_start
    from laminar_py.runtime.preflight.inputs import shown_prompt as shown_prompt
    from laminar_py.runtime.preflight.memory import COMMAND_TIMEOUT_S as COMMAND_TIMEOUT_S
    from laminar_py.runtime.preflight.memory import GPU_BYTES as GPU_BYTES
    from laminar_py.runtime.preflight.memory import KINDS as KINDS
    from laminar_py.runtime.preflight.memory import SPARE_SHARE as SPARE_SHARE
    from laminar_py.runtime.preflight.memory import GpuMemory as GpuMemory
    from laminar_py.runtime.preflight.memory import Parts as Parts
    from laminar_py.runtime.preflight.memory import engine_memory as engine_memory
    from laminar_py.runtime.preflight.memory import gpu_memory as gpu_memory
    from laminar_py.runtime.preflight.memory import learner_memory as learner_memory
    from laminar_py.runtime.preflight.memory import memory_faults as memory_faults
    from laminar_py.runtime.preflight.model_shape import BF16_BYTES as BF16_BYTES
    from laminar_py.runtime.preflight.model_shape import ModelShape as ModelShape
    from laminar_py.runtime.preflight.model_shape import kv_token_bytes as kv_token_bytes
    from laminar_py.runtime.preflight.model_shape import read_shape as read_shape
    from laminar_py.runtime.preflight.node_checks import gpu_nodes as gpu_nodes
    from laminar_py.runtime.preflight.node_checks import node_faults as node_faults
    from laminar_py.runtime.preflight.node_checks import smallest_gpus as smallest_gpus
    from laminar_py.runtime.preflight.rewards import check_problems as check_problems
else:
    __getattr__ = public_names(__name__)
