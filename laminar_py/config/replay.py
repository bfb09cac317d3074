"""Settings of replay: which groups of earlier steps a step trains on again."""

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from laminar_py.config.section import ConfigError, Count, Section
from laminar_py.records.columns import Source

_OF_STAGE = {  # its setting, and the remedy where steps replay
    Source.REFERENCE: ("algorithm.reference_pass=stage", "set reference_pass to learner"),
    Source.TEACHER: ("algorithm.teacher", "let your reward function return teacher_logprobs, or set share to 0"),
}


class ReplayBy(StrEnum):
    """Groups that replays prefer; see `ReplayConfig.by`."""

    UNIFORM = "uniform"
    REWARD = "reward"
    RECENCY = "recency"


class ReplayConfig(Section):
    """Replay: a share of each step's groups is drawn from the groups of earlier steps. Off by default. A
    trajectory is consumed once and replayed with the advantage that it had then, as long as it is young enough.
    Ratios are against the policy that sampled it."""

    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Most of a step's `rollout.prompts_per_step` groups that may be replayed ones, rounded down. The step waits
    for the other groups only, and has fewer groups while too few can be replayed. 0: no replay."""
    max_age: Count = 16
    """Bound on the age of a replayed group, in learner steps since the oldest weights in it. Apart from
    `staleness.max_staleness`, whose `policies` do not concern replays."""
    capacity: Count = 256
    """Groups that may be replayed: the last ones that steps consumed."""
    by: ReplayBy = ReplayBy.UNIFORM
    """`uniform`: all groups are drawn alike. `reward`, `recency`: in proportion to 1 / rank, where the group with
    the highest mean reward, or the last consumed one, has rank 1. Of equal rewards the later has the better
    rank."""
    most: Count = 4
    """Times that one group may be replayed."""

    @property
    def kept(self) -> int:
        """Groups that may be replayed; 0 without replay."""
        return self.capacity if self.share else 0

    def groups_of(self, prompts_per_step: int) -> int:
        """Return how many of a step's groups are replayed at most."""
        return int(self.share * prompts_per_step + 1e-9)


def check_replay(
    replay: ReplayConfig, *, prompts_per_step: int, stages: Collection[Source], controlled: bool
) -> None:
    """Raise `ConfigError` if no group or not the wanted share of groups can be replayed.

    `stages` are the frozen models with a process each, whose columns are in memory only; `controlled` says whether
    `staleness.control` is on.
    """
    if not replay.share:
        return
    share, again = f"buffer.replay.share={replay.share:g}", replay.groups_of(prompts_per_step)
    if not again:
        raise ConfigError(
            f"{share}: of rollout.prompts_per_step={prompts_per_step} that is less than one group; raise share to"
            f" at least {1 / prompts_per_step:.3g}"
        )
    if replay.capacity < again:
        raise ConfigError(
            f"buffer.replay.capacity={replay.capacity}: {share} replays {again} groups a step; raise capacity"
        )
    fresh = prompts_per_step - again
    name, bound = ("most", replay.most) if replay.most <= replay.max_age else ("max_age", replay.max_age)
    if bound * fresh < again:
        raise ConfigError(
            f"buffer.replay.{name}={bound}: {share} replays each group {again / fresh:.2g} times"
            f" on average; raise {name} to at least {-(-again // fresh)}, or lower share"
        )
    if controlled:
        raise ConfigError(
            f"{share}: staleness.control would take replayed tokens for the effect of its bound; leave one of the"
            " two out"
        )
    for stage in stages:
        setting, remedy = _OF_STAGE[stage]
        raise ConfigError(
            f"{setting}: with {share} a resumed run would lack the {stage}'s log-probabilities of replayed groups;"
            f" {remedy}"
        )
