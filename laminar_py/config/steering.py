"""Settings of `staleness.control`, which moves the bound on staleness during a run."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.section import ConfigError, Count, Section, Share


class StalenessControl(Section):
    """Control of `max_staleness` within limits, by measurements of the last steps; off unless given, e.g. as
    `staleness.control={}`. `max_staleness` is the start. Control leaves a bound that `laminar set` has changed,
    until a resume names it. Only for `schedule=async` with `wait` in `policies`, without `buffer.replay.share`."""

    min: Annotated[int, Field(ge=0)] = 1
    """Least bound, learner steps."""
    max: Count = 8
    """Largest bound, learner steps. The default of `buffer.capacity` has room for it."""
    max_publish_every: Count | None = None
    """Largest `learner.publish_every`: it rises from its value while the learner waits for publishes for a tenth
    of the time. None: it stays."""
    window: Annotated[int, Field(ge=2)] = 5
    """Learner steps whose mean decides. After a change, steps of data from before it do not count."""
    least_effective: Share = 0.7
    """Least effective sample size of the oldest data, over the one of fresh data: below it the bound falls. The
    bound rises only while less than half of the allowed part is lost."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min > self.max:
            raise ConfigError(
                f"staleness.control.min={self.min}: is above staleness.control.max={self.max}; lower it"
            )
        return self
