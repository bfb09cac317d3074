"""A replica: the trajectories that run in one engine, and the weights that the engine serves."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.rollout.replica import Replica as Replica
    from laminar_py.rollout.storing import SegmentStore as SegmentStore
else:
    __getattr__ = public_names(__name__)
