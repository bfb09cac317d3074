"""A rollout replica: trajectories on one engine, weight loads, reports; read `rollout.replica` first."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.rollout.calibration import LONG_PROMPT as LONG_PROMPT
    from laminar_py.rollout.calibration import PROMPT as PROMPT
    from laminar_py.rollout.calibration import EngineBounds as EngineBounds
    from laminar_py.rollout.calibration import TimedRequests as TimedRequests
    from laminar_py.rollout.replica import Replica as Replica
    from laminar_py.rollout.storing import SegmentStore as SegmentStore
else:
    __getattr__ = public_names(__name__)
