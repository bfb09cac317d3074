"""Objectives, corrections, advantages."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.learner.losses.advantages import group_advantages as group_advantages
    from laminar_py.learner.losses.advantages import overlong_cost as overlong_cost
    from laminar_py.learner.losses.logprob import token_logprobs as token_logprobs
else:
    __getattr__ = public_names(__name__)
