"""Settings of consolidation in flight."""

from enum import StrEnum

from laminar_py.config.section import Count, Seconds, Section


class RepackPlanner(StrEnum):
    """What consolidates trajectories in flight."""

    NONE = "none"
    PAPER = "paper"
    PREDICTIVE = "predictive"


class RepackConfig(Section):
    """Consolidation of trajectories in flight: a replica's last ones move to others of its weight version, so that
    it takes new weights and prompts. Only under `rollout.on_new_weights=drain` and `schedule=async`."""

    planner: RepackPlanner | None = None
    """`paper`: Best-Fit, a source goes whole to one destination. `predictive`: what waits is shared; a source is
    split over several destinations, by predicted remaining tokens and the cost of computing KV caches anew, and
    only where that gains. `none`: nothing moves. Default: `predictive`, where anything can move."""
    interval_s: Seconds = 5.0
    """Seconds between two rounds; there is one after every publish too."""
    max_stall_s: Seconds = 0.7
    """Longest time that one round of `predictive` may cost a destination, for the prefill of what it receives."""
    roofline_batch: Count | None = None
    """Decode batch below which a larger one costs an engine no time: `paper` keeps destinations below it. Default:
    measured, like all that planners know of an engine's speed, on an idle one before the first run, and cached."""
