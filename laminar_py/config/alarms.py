"""Settings of the alarms: what a run does about each silent failure that it finds."""

from enum import StrEnum

from laminar_py.config.section import Section


class Reaction(StrEnum):
    """Reaction to an alarm, beside its line and its event."""

    OFF = "off"  # not even these
    WARN = "warn"
    STOP = "stop"


class AlarmsConfig(Section):
    """Reaction to each silent failure ([silent_failures.md](silent_failures.md)). `warn` prints one line and
    records an event. `stop` also ends the run with exit code 1 and keeps the last checkpoint before the alarm;
    `--resume` continues from there and checks again. `off` does nothing."""

    weights: Reaction = Reaction.STOP
    """An engine serves other weights than the learner published."""
    probes: Reaction = Reaction.STOP
    """An engine and the learner compute different probabilities under the same version."""
    sampling: Reaction = Reaction.STOP
    """Engines draw tokens with other settings than the run has."""
    step: Reaction = Reaction.STOP
    """A step trained on other tokens, trajectories or loss weights than the ledger says, or its gradients do
    not follow from its loss."""
    optimizer: Reaction = Reaction.STOP
    """A trained tensor has gradients and does not change."""
    reference: Reaction = Reaction.STOP
    """The reference model or the teacher changes."""
    checkpoint: Reaction = Reaction.STOP
    """A checkpoint on disk differs from the learner's state."""
    draws: Reaction = Reaction.STOP
    """A problem is skipped or drawn twice."""
    groups: Reaction = Reaction.STOP
    """The samples of a group are copies of each other."""
    scores: Reaction = Reaction.STOP
    """Failed rewards count as scores, or a batch lacks trajectories."""
    evaluation: Reaction = Reaction.STOP
    """An evaluation answers under other weights than it says, or on problems that are trained on."""
    rewards: Reaction = Reaction.WARN
    """The reward of a task never varies, or follows the length of the response alone."""
    coverage: Reaction = Reaction.WARN
    """Drops take one task, or long responses, more than others."""
    staleness: Reaction = Reaction.WARN
    """With `staleness.control`: the reward falls while old data has lost its effective sample size."""
