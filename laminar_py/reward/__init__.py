"""Scoring of responses: the stage, the scorers, two terms and the processes that call functions."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.reward.calls.child import WriteFence as WriteFence
    from laminar_py.reward.scorer import LaunchedServers as LaunchedServers
    from laminar_py.reward.scorer import Scorer as Scorer
else:
    __getattr__ = public_names(__name__)
