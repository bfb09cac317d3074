"""Objectives, corrections, advantages."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.learner.losses.logprob import token_logprobs as token_logprobs
else:
    __getattr__ = public_names(__name__)
