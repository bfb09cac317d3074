"""Settings of what `laminar simulate` has in the place of rewards, relays, the link, and of what fails."""

from typing import Annotated

from pydantic import Field

from laminar_py.config.section import Count, Seconds, Section

Share = Annotated[float, Field(ge=0, le=1)]
Delay = Annotated[float, Field(ge=0, le=86_400)]  # of which a simulation lives through each second


class SimulationConfig(Section):
    """Times of the parts that a simulation has no model of GPUs for; engines and learner are in `emulation`. All
    in seconds of the run, as everything but `emulation` is."""

    prompt_tokens: Count = 400
    """Tokens of a prompt."""
    solved: Share = 0.5
    """Share of responses with reward 1; the others have 0."""
    reward_median_s: Delay = 0.05
    """Median of the time that a response's score takes, log-normal."""
    reward_sigma: Delay = 0.0
    """Standard deviation of its logarithm."""
    scorers: Count | None = None
    """Responses that are scored at a time; others wait, first come first served. `null`: no limit."""
    publish_s: Delay = 0.5
    """From a learner's step to the new version in the memory of every replica's host; with `link_gbit_per_s` in
    that of the learner's host, from which it travels on."""
    link_gbit_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What a host passes on to one other, in seconds of the GPUs: a version, 2 bytes for each parameter of the
    profile, goes down the tree of `relay.topology`, and a replica may load it when all of it is on its host.
    `null`: every host has it after `publish_s`."""
    replicas_per_host: Count = 8
    """Replicas that share a host, and the relay on it; e.g. 2 where each has four of eight GPUs."""
    replica_mtbf_s: Seconds | None = None
    """Mean time between failures of one replica, whose process dies then, exponential. What it had goes on
    elsewhere, from where its journal (`rollout.partial_interval_s`) ends. `null`: none fails."""
    restart_s: Delay = 60.0
    """From a replica's failure until it serves the newest weights again."""
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
