"""Typed records that cross processes, their codec, and the protocols of engines and weights."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.records.codec import FloatArray as FloatArray
    from laminar_py.records.codec import IntArray as IntArray
    from laminar_py.records.codec import decode as decode
    from laminar_py.records.codec import encode as encode
    from laminar_py.records.columns import Column as Column
    from laminar_py.records.engine import Delta as Delta
    from laminar_py.records.engine import EngineLostError as EngineLostError
    from laminar_py.records.engine import EngineStatus as EngineStatus
    from laminar_py.records.engine import GenerateRequest as GenerateRequest
    from laminar_py.records.engine import InferenceEngine as InferenceEngine
    from laminar_py.records.engine import PauseMode as PauseMode
    from laminar_py.records.engine import SamplingParams as SamplingParams
    from laminar_py.records.environment import Problem as Problem
    from laminar_py.records.events import Assigned as Assigned
    from laminar_py.records.events import Checkpointed as Checkpointed
    from laminar_py.records.events import Finished as Finished
    from laminar_py.records.events import Interrupted as Interrupted
    from laminar_py.records.events import Ready as Ready
    from laminar_py.records.events import RunStarted as RunStarted
    from laminar_py.records.events import Stepped as Stepped
    from laminar_py.records.events import VersionLoaded as VersionLoaded
    from laminar_py.records.events import VersionPublished as VersionPublished
    from laminar_py.records.host import Clock as Clock
    from laminar_py.records.host import SystemClock as SystemClock
    from laminar_py.records.metrics import FleetRow as FleetRow
    from laminar_py.records.metrics import StepMetrics as StepMetrics
    from laminar_py.records.metrics import StepRow as StepRow
    from laminar_py.records.pieces import PayloadLostError as PayloadLostError
    from laminar_py.records.pieces import Piece as Piece
    from laminar_py.records.pieces import PieceRef as PieceRef
    from laminar_py.records.pieces import Recording as Recording
    from laminar_py.records.pieces import TokensRef as TokensRef
    from laminar_py.records.pieces import join_masks as join_masks
    from laminar_py.records.replica import Assignment as Assignment
    from laminar_py.records.replica import Held as Held
    from laminar_py.records.replica import Progress as Progress
    from laminar_py.records.replica import Survey as Survey
    from laminar_py.records.scoring import Reward as Reward
    from laminar_py.records.scoring import Score as Score
    from laminar_py.records.scoring import ScoringRequest as ScoringRequest
    from laminar_py.records.scoring import Unscored as Unscored
    from laminar_py.records.spans import Span as Span
    from laminar_py.records.trajectory import DropReason as DropReason
    from laminar_py.records.trajectory import FinishedTrajectory as FinishedTrajectory
    from laminar_py.records.trajectory import FinishReason as FinishReason
    from laminar_py.records.trajectory import Kind as Kind
    from laminar_py.records.trajectory import MicroBatch as MicroBatch
    from laminar_py.records.trajectory import Prompt as Prompt
    from laminar_py.records.trajectory import Trajectory as Trajectory
    from laminar_py.records.weights import Published as Published
    from laminar_py.records.weights import PulledVersion as PulledVersion
else:
    __getattr__ = public_names(__name__)
