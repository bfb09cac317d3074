"""Settings of schedule, staleness and buffer."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.section import ConfigError, Count, Section


class Schedule(StrEnum):
    """Moments at which prompts are admitted, relative to learner steps."""

    ASYNC = "async"
    ONE_STEP = "one_step"
    SYNC = "sync"


class StalePolicy(StrEnum):
    """Means that enforce `max_staleness`."""

    WAIT = "wait"
    DROP = "drop"
    REWEIGHT = "reweight"


class StalenessConfig(Section):
    """How old a trajectory may be when the learner consumes it: learner steps since the oldest weights in it."""

    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Bound, in learner steps; at least `learner.publish_every` - 1. None leaves staleness inherent (whatever
    generation time makes it)."""
    policies: tuple[StalePolicy, ...] = (StalePolicy.WAIT, StalePolicy.DROP)
    """`wait` holds admission so that the bound is rarely met; what exceeds it when it is consumed is dropped
    (`drop`) or has its loss scaled by `(max_staleness + 1) / (staleness + 1)` (`reweight`)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {StalePolicy.DROP, StalePolicy.REWEIGHT} <= set(self.policies):
            raise ConfigError("staleness.policies has both drop and reweight; keep one of them")
        if self.max_staleness is not None and not self.policies:
            raise ConfigError(
                "staleness.policies is empty although staleness.max_staleness is set; name wait, drop or reweight"
            )
        return self

    def unbounded(self, schedule: Schedule) -> bool:
        """True where neither bound nor schedule limits how old a trajectory may be."""
        return schedule is Schedule.ASYNC and self.max_staleness is None

    @property
    def enforced(self) -> int | None:
        """The bound, where consumption drops or reweights what exceeds it."""
        return self.max_staleness if {StalePolicy.DROP, StalePolicy.REWEIGHT} & set(self.policies) else None


class BufferConfig(Section):
    """Trajectories between generation and learner."""

    capacity: Count | None = None
    """Live trajectories (running, being scored, ready, in the learner) above which no prompt is admitted;
    default 4 learner steps and one batch for each replica."""


def check_buffer(capacity: int, trajectories_per_step: int) -> None:
    """Refuse a depth that no learner step fits."""
    if capacity < trajectories_per_step:
        raise ConfigError(
            f"buffer.capacity={capacity} is below one learner step of {trajectories_per_step} trajectories"
            " (rollout.prompts_per_step * rollout.group_size); raise it"
        )


def check_schedule(schedule: Schedule, staleness: StalenessConfig, *, publish_every: int) -> None:
    """Refuse a bound that the schedule itself, or the learner between two versions, exceeds."""
    if schedule is Schedule.ONE_STEP and staleness.enforced == 0:
        raise ConfigError(
            "staleness.max_staleness=0 is what schedule=one_step exceeds at every other step; set it to 1 or"
            " choose schedule=sync"
        )
    least = publish_every - (schedule is not Schedule.ONE_STEP)
    if staleness.enforced is not None and staleness.enforced < least:
        raise ConfigError(
            f"staleness.max_staleness={staleness.enforced} is below the age of what schedule={schedule} begins"
            f" between two versions with learner.publish_every={publish_every}; set it to at least {least}"
        )
