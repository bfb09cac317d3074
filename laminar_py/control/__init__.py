"""Decisions about trajectories, which the controller makes; read `control.scheduler` first."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.control.consumption import StepBatch as StepBatch
    from laminar_py.control.dispatcher import DISPATCH_S as DISPATCH_S
    from laminar_py.control.dispatcher import Throttle as Throttle
    from laminar_py.control.groups import Credit as Credit
    from laminar_py.control.incoming import HOUSEKEEPING_S as HOUSEKEEPING_S
    from laminar_py.control.lease import DeviceLease as DeviceLease
    from laminar_py.control.lease import Holder as Holder
    from laminar_py.control.lease import leased_batch as leased_batch
    from laminar_py.control.lease import make_lease as make_lease
    from laminar_py.control.live_settings import LiveSettings as LiveSettings
    from laminar_py.control.scheduler import TrajectoryScheduler as TrajectoryScheduler
    from laminar_py.control.settings import control_settings as control_settings
    from laminar_py.control.steps import RefillWatch as RefillWatch
    from laminar_py.control.steps import pack_step as pack_step
    from laminar_py.control.steps import step_events as step_events
else:
    __getattr__ = public_names(__name__)
