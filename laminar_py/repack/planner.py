"""Planners: which trajectories in flight move where, for replicas that serve the same weight version.

A planner is built for one round of `repack.migration` and asked for a plan for each version that several replicas
serve. It goes by the `PlanningContext` and the surveys alone. A plan never fills a replica beyond its KV cache or
its slots, and moves each trajectory at most once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from laminar_py.records.replica import Held, Move, Survey
from laminar_py.repack.signals import EngineSpeed, Numbers


class Forecast(Protocol):
    """A prediction of what is to come, e.g. `signals.GroupForecast`."""

    def __call__(self, held: Sequence[Held], /) -> Numbers:
        """[n] tokens to come of their responses."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """State of a run that a planner may go by in one round."""

    speed: EngineSpeed
    forecast: Forecast
    max_stall_s: float  # the longest that a destination may stand still for the prefill of what it receives
    max_new_tokens: int  # cap on responses
    hold_s: float = math.inf  # the longest that a version is kept where environments alone work
    growth: int = 64  # tokens that a response adds between the survey and its hand-over
    has_demand: bool = True  # a replica that becomes free gets new prompts
    previous_kv: Mapping[int, int] = field(default_factory=dict)  # KV tokens of each replica when last asked


class Planner(Protocol):
    """A planner of one round, e.g. `PredictivePlanner(context)`; `config.repack.PLANNERS` has their classes."""

    def plan(self, group: Sequence[Survey]) -> list[Move]:
        """Moves among replicas that serve the same version."""
        ...


def move_of(held: Held, source: Survey, destination: int) -> Move:
    """The move of a trajectory with all that it has."""
    return Move(held.trajectory_id, source.replica, destination, held.context)
