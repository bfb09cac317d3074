"""The interface of planners.

`repack.migration` builds a planner for each round and asks it for one plan per version that several replicas
serve. A planner uses only its `PlanningContext` and the surveys. A plan fills no replica beyond its KV cache or
slots, and moves each trajectory at most once (`tests/repack/test_planner.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from laminar_py.records.replica import Move, Survey, TrajectorySummary
from laminar_py.repack.signals import EngineSpeed, Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """State of a run that a planner uses in one round."""

    speed: EngineSpeed  # of every replica's engine
    forecast: Callable[[Sequence[TrajectorySummary]], Numbers]  # [n] expected remaining tokens of n responses
    max_stall_s: float  # longest prefill of received trajectories, for which a destination stops decoding
    hold_s: float = math.inf  # longest time to keep a version while all trajectories wait for environments
    growth: int = 64  # tokens that a response may add between survey and hand-over
    has_demand: bool = True  # False: an emptied replica would get no new prompts
    previous_kv: Mapping[int, int] = field(default_factory=dict)  # KV tokens of each replica at its last survey


class Planner(Protocol):
    """A planner of one round, e.g. `PredictivePlanner(context)`, whose class is in `config.rollout.PLANNERS`."""

    def plan(self, surveys: Sequence[Survey]) -> list[Move]:
        """Return moves among the replicas in `surveys`, which serve the same version."""
        ...
