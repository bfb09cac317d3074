"""Typed records that cross processes. All modules here are public; this one has the names that users need most."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.records.columns import Column as Column
    from laminar_py.records.engine import Delta as Delta
    from laminar_py.records.engine import EngineLostError as EngineLostError
    from laminar_py.records.engine import EngineStatus as EngineStatus
    from laminar_py.records.engine import GenerateRequest as GenerateRequest
    from laminar_py.records.engine import InferenceEngine as InferenceEngine
    from laminar_py.records.engine import PauseMode as PauseMode
    from laminar_py.records.engine import SamplingParams as SamplingParams
    from laminar_py.records.environment import Problem as Problem
    from laminar_py.records.metrics import StepRow as StepRow
    from laminar_py.records.pieces import Recording as Recording
    from laminar_py.records.scoring import Reward as Reward
    from laminar_py.records.scoring import ScoringRequest as ScoringRequest
    from laminar_py.records.scoring import TryAgainError as TryAgainError
    from laminar_py.records.trajectory import DropReason as DropReason
    from laminar_py.records.trajectory import FinishReason as FinishReason
    from laminar_py.records.trajectory import Prompt as Prompt
    from laminar_py.records.trajectory import Trajectory as Trajectory
else:
    __getattr__ = public_names(__name__)
