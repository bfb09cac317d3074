"""Environments: they answer the turns of a model, in processes of their own."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.environment.calls import CallFailedError as CallFailedError
    from laminar_py.environment.calls import call_in_thread as call_in_thread
    from laminar_py.environment.protocol import MAX_STOP_CHARS as MAX_STOP_CHARS
    from laminar_py.environment.protocol import MAX_STOPS as MAX_STOPS
    from laminar_py.environment.protocol import MAX_TURN_TOKENS as MAX_TURN_TOKENS
    from laminar_py.environment.protocol import Answer as Answer
    from laminar_py.environment.protocol import Begin as Begin
    from laminar_py.environment.protocol import End as End
    from laminar_py.environment.protocol import Environment as Environment
    from laminar_py.environment.protocol import Observation as Observation
    from laminar_py.environment.protocol import Problem as Problem
    from laminar_py.environment.protocol import Rewrite as Rewrite
    from laminar_py.environment.protocol import Role as Role
    from laminar_py.environment.protocol import SampledTurn as SampledTurn
    from laminar_py.environment.protocol import TokenEnvironment as TokenEnvironment
    from laminar_py.environment.protocol import TokenPrompt as TokenPrompt
else:
    __getattr__ = public_names(__name__)
