"""Settings of what `laminar simulate` has in the place of rewards, relays and the link."""

from typing import Annotated

from pydantic import Field

from laminar_py.config.section import Count, Section

Share = Annotated[float, Field(ge=0, le=1)]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SimulationConfig(Section):
    """Times of the parts that a simulation has no model of GPUs for; engines and learner are in `emulation`. All
    in seconds of the run, as everything but `emulation` is."""

    prompt_tokens: Count = 400
    """Tokens of a prompt."""
    solved: Share = 0.5
    """Share of responses with reward 1; the others have 0."""
    reward_median_s: Delay = 0.05
    """Median of the time from a response's end to its score, log-normal."""
    reward_sigma: Delay = 0.0
    """Standard deviation of its logarithm."""
    publish_s: Delay = 0.5
    """From a learner's step to the new version in the memory of every replica's host."""
    hop_s: Delay = 0.02
    """A report's way to the controller and onto its desk: an assumption, not measured by itself."""
    order_s: Delay = 0.01
    """An order's way from the controller to its replica: an assumption, too."""
    cores: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Cores that engines, learner and all else share, where they compute on CPUs: one each at most, the engines
    what the others leave; 1.5 where other work takes half of one. Times in the profile are then CPU seconds. None:
    each has what it needs."""
    trajectory_cpu_s: Delay = 0.0
    """With `cores`: CPU seconds that a trajectory takes of all but engines and learner."""
