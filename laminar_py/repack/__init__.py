"""Repacking: rounds that move running trajectories between replicas of one weight version, and their planners."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.repack.migration import Migration as Migration
    from laminar_py.repack.migration import MigrationSettings as MigrationSettings
    from laminar_py.repack.planner import PlanningContext as PlanningContext
    from laminar_py.repack.signals import EngineSpeed as EngineSpeed
else:
    __getattr__ = public_names(__name__)
