"""Checks before a run, and GPUs by name."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.runtime.preflight.gpus import gpu_named as gpu_named
    from laminar_py.runtime.preflight.inputs import prepare as prepare
else:
    __getattr__ = public_names(__name__)
