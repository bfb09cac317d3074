"""Settings of consolidation in flight."""

from laminar_py.config.registry import Registry
from laminar_py.config.rollout import OnNewWeights, RolloutConfig
from laminar_py.config.section import ConfigError, Count, Seconds, Section
from laminar_py.config.staleness import Schedule

NO_PLANNER, DEFAULT_PLANNER = "none", "predictive"
PLANNERS: Registry[type] = Registry(  # classes of `repack.planner.Planner`, each made with a `PlanningContext`
    type,
    field="repack.planner",
    group="laminar_py.planners",
    built_in={
        "paper": "laminar_py.repack.paper:PaperPlanner",
        "predictive": "laminar_py.repack.predictive:PredictivePlanner",
    },
)


class RepackConfig(Section):
    """Consolidation of trajectories in flight: a replica's last ones move to others of its weight version, so that
    it takes new weights and prompts. Only under `rollout.on_new_weights=drain` and `schedule=async`."""

    planner: str | None = None
    """`paper`: Best-Fit, a source goes whole to one destination. `predictive`: what waits is shared; the emptiest
    are emptied, and what they have is spread evenly over the others, by predicted remaining tokens and the cost of
    computing KV caches anew, and only where that gains. Or what an installed package announces as
    `laminar_py.planners`. `none`: nothing moves. Default: `predictive`, where anything can move."""
    interval_s: Seconds = 5.0
    """Seconds between two rounds; there is one after every publish too."""
    max_stall_s: Seconds = 5.0
    """Longest time that one round of `predictive` may cost a destination, for the prefill of what it receives; a
    source that cannot be emptied within it stays."""
    roofline_batch: Count | None = None
    """Decode batch below which a larger one costs an engine no time: `paper` keeps destinations below it. Default:
    measured, like all that planners know of an engine's speed, on an idle one before the first run, and cached."""


def can_repack(schedule: Schedule, rollout: RolloutConfig) -> bool:
    """True where a replica that becomes free gets prompts: under other schedules it waits for the whole batch."""
    drains = rollout.on_new_weights is OnNewWeights.DRAIN and schedule is Schedule.ASYNC
    return drains and rollout.replicas > 1


def check_planner(repack: RepackConfig, schedule: Schedule, rollout: RolloutConfig) -> None:
    """Refuse a planner that is none, or would have nothing to move."""
    if repack.planner in (None, NO_PLANNER):
        return
    PLANNERS.get(repack.planner)
    if not can_repack(schedule, rollout):
        raise ConfigError(
            f"repack.planner={repack.planner} moves nothing under schedule={schedule},"
            f" rollout.on_new_weights={rollout.on_new_weights}, rollout.replicas={rollout.replicas}; it needs"
            " async, drain and two replicas, or set it to none"
        )
