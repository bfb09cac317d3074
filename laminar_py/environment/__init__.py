"""Environments: they answer the turns of a model, in processes of their own."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.environment.calls import LARGEST as LARGEST
    from laminar_py.environment.calls import CallFailedError as CallFailedError
    from laminar_py.environment.calls import call_in_thread as call_in_thread
    from laminar_py.environment.protocol import MOST_TOKENS as MOST_TOKENS
    from laminar_py.environment.protocol import Answer as Answer
    from laminar_py.environment.protocol import Begin as Begin
    from laminar_py.environment.protocol import End as End
    from laminar_py.environment.protocol import Environment as Environment
    from laminar_py.environment.protocol import Observation as Observation
    from laminar_py.environment.protocol import Problem as Problem
    from laminar_py.environment.protocol import Rewrite as Rewrite
    from laminar_py.environment.protocol import Role as Role
    from laminar_py.environment.protocol import SampledTurn as SampledTurn
    from laminar_py.environment.protocol import TokenWords as TokenWords
    from laminar_py.environment.protocol import TurnListener as TurnListener
    from laminar_py.environment.tool_calls import BrokenCall as BrokenCall
    from laminar_py.environment.tool_calls import Call as Call
    from laminar_py.environment.tool_calls import CallFamily as CallFamily
    from laminar_py.environment.tool_calls import CallFormat as CallFormat
    from laminar_py.environment.tool_calls import HermesCalls as HermesCalls
    from laminar_py.environment.tool_calls import Json as Json
    from laminar_py.environment.tool_calls import LlamaCalls as LlamaCalls
    from laminar_py.environment.tool_calls import TagCalls as TagCalls
    from laminar_py.environment.tool_calls import WrittenCall as WrittenCall
    from laminar_py.environment.tool_calls import check_pattern as check_pattern
    from laminar_py.environment.tool_calls import last_group as last_group
    from laminar_py.environment.tool_calls import outside_reasoning as outside_reasoning
else:
    __getattr__ = public_names(__name__)
