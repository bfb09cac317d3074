"""Comparison of outputs, for rewards."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.reward.code import same_output as same_output
    from laminar_py.reward.code import same_value as same_value
else:
    __getattr__ = public_names(__name__)
