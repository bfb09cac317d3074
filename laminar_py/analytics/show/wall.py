"""A diagnosis as the page shows it: the binding wall, and the stages of a mean step as they wait for each other.

Called by `laminar report` and the dashboard.
"""

from pathlib import Path

from laminar_py.analytics.show.panels import RemedyLine, StageBar, WallPanel
from laminar_py.analytics.triage.goodput import Stage, StageTimes
from laminar_py.analytics.triage.remedies import Wall
from laminar_py.analytics.triage.triage import STAGE_OF, Diagnosis, read_diagnosis
from laminar_py.config.staleness import Schedule

SMALL = 1e-4  # seconds of a stage that is not drawn
MEANINGS = {
    Wall.GENERATION: "Replicas generate as fast as they can, and the rest of the run waits for them.",
    Wall.LONG_TAIL: "A few long responses keep replicas nearly empty while everybody waits for the last of them.",
    Wall.REWARD: "Responses are finished faster than they are scored.",
    Wall.REFERENCE: "The reference model's pass takes more of a step than anything that could go on beside it.",
    Wall.WEIGHTS: "New weights are so long on their way to the replicas that these stand empty meanwhile.",
    Wall.LEARNER: "Trajectories are there faster than the learner trains on them.",
    Wall.FRESHNESS: "The bound on staleness keeps the replicas from beginning new work, though nothing is busy.",
    Wall.SPARSE_REWARD: "Most of what is generated never succeeds, and teaches nothing.",
}


def read_wall(run: Path) -> WallPanel | None:
    """What limits a run; None before its first whole step, or without its config. Raises `ValueError`."""
    if not (run / "config.yaml").is_file():
        return None
    diagnosis = read_diagnosis(run)
    return None if diagnosis is None else wall_panel(diagnosis)


def wall_panel(diagnosis: Diagnosis) -> WallPanel:
    """The same in the words of the page."""
    binding, following, times = diagnosis.binding, diagnosis.next, diagnosis.reading.times
    evidence = (
        binding.evidence,
        f"without it, goodput would be at most {binding.gain:.3g} times as high",
        f"the next wall is then {following.wall}: {following.evidence}",
    )
    moves = tuple(RemedyLine(f"{move.key}: {move.change}", move.why) for move in binding.remedies)
    stages = stage_bars(diagnosis.reading.schedule, times, binding.wall)
    return WallPanel(
        name=str(binding.wall),
        evidence=evidence,
        remedies=moves,
        stages=stages,
        step_s=diagnosis.reading.measured_s,
        meaning=MEANINGS[binding.wall],
    )


def stage_bars(schedule: Schedule, times: StageTimes, wall: Wall) -> tuple[StageBar, ...]:
    """Stages that wait for each other one after another, the others side by side, see `goodput.compose`."""
    rollout = max(times.generation_s, times.reward_s, times.reference_s)
    match schedule:
        case Schedule.SYNC:
            begin = {Stage.LEARNER: rollout, Stage.WEIGHTS: rollout + times.learner_s}
        case Schedule.ONE_STEP:
            begin = {Stage.WEIGHTS: max(rollout, times.learner_s)}
        case Schedule.ASYNC:
            begin = {Stage.WEIGHTS: times.generation_s}
    of_wall = Stage.GENERATION if wall is Wall.LONG_TAIL else STAGE_OF.get(wall)
    return tuple(
        StageBar(name=str(stage), start_s=begin.get(stage, 0.0), seconds=times.of(stage), binding=stage is of_wall)
        for stage in Stage
        if times.of(stage) >= SMALL
    )
