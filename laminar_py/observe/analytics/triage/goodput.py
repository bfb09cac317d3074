"""The one equation, `goodput = useful tokens of a step / duration of a step`, and what changes would give. Pure.

`compose` says how long a step takes from what each stage takes for it. What is measured beyond that is slack: time
in which no stage is busy enough to explain the step.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from laminar_py.config.staleness import Schedule


class StepStage(StrEnum):
    """Stage of a step, in the order of a trajectory's way."""

    GENERATION = "generation"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    REFERENCE = "reference"
    LEARNER = "learner"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that each stage works for one step, e.g. generation 32.3 s and the learner 12.1 s of a step of 34 s.

    Each is what the stage takes with all its replicas, workers or ranks: doubling them halves it.
    """

    generation_s: float  # tau_R
    environment_s: float = 0.0  # tau_E: replicas have slots empty, since trajectories wait for their environments
    reward_s: float = 0.0  # tau_V
    reference_s: float = 0.0  # tau_ref, where it is a stage of its own, and not inside the learner
    learner_s: float = 0.0  # tau_T
    weights_s: float = 0.0  # tau_S: replicas, empty, wait for published weights, or load them
    tail_s: float = 0.0  # of generation: with so few left that more replicas would not help
    stall_s: float = 0.0  # of the learner: to publish

    def of(self, stage: StepStage) -> float:
        """Seconds of one stage."""
        seconds: float = getattr(self, f"{stage}_s")
        return seconds

    def faster(self, stage: StepStage, factor: float) -> "StageTimes":
        """Times with `factor` times as much of a stage, e.g. 2: twice the replicas. The tail stays as it is."""
        if stage is StepStage.GENERATION:
            full = self.generation_s - self.tail_s
            return replace(self, generation_s=full / factor + self.tail_s)
        return replace(self, **{f"{stage}_s": self.of(stage) / factor})

    def without(self, stage: StepStage) -> "StageTimes":
        """Times if a stage took none: with weights goes the learner's stall, of generation the tail stays."""
        if stage is StepStage.GENERATION:
            return replace(self, generation_s=self.tail_s)
        if stage is StepStage.WEIGHTS:
            return replace(self, weights_s=0.0, learner_s=self.learner_s - self.stall_s, stall_s=0.0)
        return replace(self, **{f"{stage}_s": 0.0})

    def without_tail(self) -> "StageTimes":
        """Times with all replicas full as long as they are busy."""
        return replace(self, generation_s=self.generation_s - self.tail_s, tail_s=0.0)


def compose(schedule: Schedule, times: StageTimes) -> float:
    """Seconds of a step whose stages wait for each other as `schedule` has it.

    Turns of the model and of its environment follow one another, and trajectories are scored and compared one by
    one while others are generated, so the longest of these three counts. Then under `sync` all is in turn; under
    `one_step` a batch is made while the one before trains, and weights move in between; under `async` nothing
    waits, but a replica takes weights between its trajectories.
    """
    turns = times.generation_s + times.environment_s
    rollout = max(turns, times.reward_s, times.reference_s)
    match schedule:
        case Schedule.SYNC:
            return rollout + times.learner_s + times.weights_s
        case Schedule.ONE_STEP:
            return max(rollout, times.learner_s) + times.weights_s
        case Schedule.ASYNC:
            return max(turns + times.weights_s, rollout, times.learner_s)


def predict(schedule: Schedule, *, measured_s: float, now: StageTimes, then: StageTimes) -> float:
    """Seconds of a step if its stages took `then` in place of `now`; slack stays as it is.

    Stages that come to more than the step, since they overlapped more than the schedule says, go on to overlap.
    """
    composed, predicted = compose(schedule, now), compose(schedule, then)
    if composed > measured_s:
        return measured_s * predicted / composed
    return predicted + measured_s - composed
