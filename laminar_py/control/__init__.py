"""Policies of the control plane."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.control.lifecycle import Lifecycle as Lifecycle
else:
    __getattr__ = public_names(__name__)
