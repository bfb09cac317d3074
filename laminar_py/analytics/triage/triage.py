"""What limits a run, by name: the binding wall, its evidence, what to change first, and what that can gain.

A wall is judged by the goodput that would be there without it, so one that does not bind gains nothing. Called by
the report, by the end of `laminar train`, and by the dashboard.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from laminar_py.analytics.measure.pipeline import read_record
from laminar_py.analytics.triage.goodput import Stage, StageTimes, compose, predict
from laminar_py.analytics.triage.reading import Reading, read_reading
from laminar_py.analytics.triage.remedies import Remedy, Wall, remedies
from laminar_py.config.run import RunConfig
from laminar_py.config.staleness import Schedule
from laminar_py.ledger.database import reading as reading_ledger

SPARSE = 0.5  # share of the groups without any success from which on that may be the wall
STAGE_OF = {
    Wall.GENERATION: Stage.GENERATION,
    Wall.REWARD: Stage.REWARD,
    Wall.REFERENCE: Stage.REFERENCE,
    Wall.LEARNER: Stage.LEARNER,
    Wall.WEIGHTS: Stage.WEIGHTS,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One wall, e.g. LEARNER: without it goodput would be 1.3 times as high, and no change of it gains more."""

    wall: Wall
    gain: float
    evidence: str
    remedies: tuple[Remedy, ...]  # the first is to be tried first


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What limits the run, what would limit it next, and what its schedule has to do with it."""

    reading: Reading
    binding: Verdict
    next: Verdict  # once the first is gone
    composed_s: float  # of the stages, as the schedule has them wait for each other; the rest of a step is slack
    under: dict[Schedule, float]  # seconds of a step: as measured, and predicted under the other schedules
    walls_under: dict[Schedule, Stage]  # what takes most of such a step


def read_diagnosis(run: Path) -> Diagnosis | None:
    """Of a run folder; None before its first whole step. Raises `ValueError`."""
    with reading_ledger(run) as connection:
        record = read_record(run, connection)
    found = read_reading(record)
    return None if found is None else diagnose(found, record.config)


def diagnose(reading: Reading, config: RunConfig) -> Diagnosis:
    """Name the wall that binds, and the next one."""
    gains = _gains(reading)
    wall = _largest(gains, reading)
    after_it = _without(wall, reading)
    later = {name: gain for name, gain in _gains(after_it).items() if name is not wall}
    following = _largest(later, after_it)
    binding, after = (
        Verdict(name, gain, evidence(name, reading), remedies(name, config, reading))
        for name, gain in ((wall, gains[wall]), (following, later[following]))
    )
    under = {schedule: _times_under(schedule, reading) for schedule in Schedule}
    return Diagnosis(
        reading=reading,
        binding=binding,
        next=after,
        composed_s=compose(reading.schedule, reading.times),
        under={
            schedule: reading.measured_s if schedule is reading.schedule else compose(schedule, times)
            for schedule, times in under.items()
        },
        walls_under={schedule: max(Stage, key=times.of) for schedule, times in under.items()},
    )


def what_if(reading: Reading, stage: Stage, factor: float = 2.0) -> float:
    """Predicted seconds of a step with `factor` times as much of a stage, e.g. twice the replicas."""
    times = reading.times
    return predict(reading.schedule, measured_s=reading.measured_s, now=times, then=times.faster(stage, factor))


def evidence(wall: Wall, reading: Reading) -> str:
    """What of the reading speaks for a wall, in one line."""
    times, step = reading.times, reading.measured_s

    def share(seconds: float) -> str:
        return f"{seconds / step:.0%}" if step else "0%"

    match wall:
        case Wall.GENERATION:
            busy = share(times.generation_s)
            return f"replicas are busy {busy} of the time; the learner waits for a batch {share(reading.waited_s)}"
        case Wall.LONG_TAIL:
            few = f"replicas have less than a quarter of their usual batch {share(times.tail_s)} of the time"
            return f"{few}, held by the last long responses; p95 of lengths is {reading.length_ratio:.1f} x p50"
        case Wall.REWARD:
            busy = share(times.reward_s)
            return f"scorers are busy {busy} of the time; p95 of a reward is {reading.reward_p95_s:.2f} s"
        case Wall.REFERENCE:
            where = "in the learner" if reading.reference_in_learner else "as a stage"
            return f"the reference model works {share(reading.reference_s)} of the time, {where}"
        case Wall.LEARNER:
            idle = share(reading.held_s)
            busy = share(times.learner_s)
            return f"the learner is busy {busy} of the time; replicas are idle {idle}, with no room to begin"
        case Wall.WEIGHTS:
            late, way = share(times.weights_s), f"{reading.transfer_s:.2f} s"
            return f"replicas are idle {late} of the time, waiting for newer weights: {way} a step on the way"
        case Wall.FRESHNESS:
            idle = share(reading.held_s)
            held = f"replicas are idle {idle} of the time: nothing may begin, though no stage fills the step"
            if not reading.stale_share:
                return held
            return f"{held}, and {reading.stale_share:.0%} of the tokens are dropped as too old"
        case Wall.SPARSE_REWARD:
            return f"in {reading.hopeless_share:.0%} of the groups no member had any success"


def _gains(reading: Reading) -> dict[Wall, float]:
    """Goodput without each wall over goodput now."""
    now = _useful(reading) / max(reading.measured_s, 1e-9)
    gains = {}
    for wall in Wall:
        without = _without(wall, reading)
        gains[wall] = _useful(without) / max(without.measured_s, 1e-9) / max(now, 1e-12)
    return gains


def _largest(gains: dict[Wall, float], reading: Reading) -> Wall:
    """The wall with most to gain; of those that gain alike, the one that takes more of the step."""
    times = reading.times
    seconds = {wall: times.of(stage) for wall, stage in STAGE_OF.items()}
    seconds |= {Wall.LONG_TAIL: times.tail_s, Wall.GENERATION: times.generation_s - times.tail_s}
    return max(gains, key=lambda wall: (round(gains[wall], 2), seconds.get(wall, 0.0)))


def _useful(reading: Reading) -> float:
    return (1 - reading.stale_share) * (1 - reading.hopeless_share)


def _without(wall: Wall, reading: Reading) -> Reading:
    """The run if that wall were not there."""
    times = reading.times
    match wall:
        case Wall.SPARSE_REWARD:
            return replace(reading, hopeless_share=0.0) if reading.hopeless_share > SPARSE else reading
        case Wall.FRESHNESS if reading.schedule is Schedule.ASYNC:
            composed = compose(reading.schedule, times)
            return replace(reading, measured_s=min(composed, reading.measured_s), held_s=0.0, stale_share=0.0)
        case Wall.FRESHNESS:
            return replace(reading, stale_share=0.0)
        case Wall.LONG_TAIL:
            then = times.without_tail()
        case Wall.REFERENCE if reading.reference_in_learner:
            then = replace(times, learner_s=max(0.0, times.learner_s - reading.reference_s))
        case _:
            then = times.without(STAGE_OF[wall])
    measured = predict(reading.schedule, measured_s=reading.measured_s, now=times, then=then)
    return replace(reading, times=then, measured_s=measured)


def _times_under(schedule: Schedule, reading: Reading) -> StageTimes:
    """What stages would take under a schedule; where batches are waited for, so are their longest trajectories."""
    times = reading.times
    if schedule in (reading.schedule, Schedule.ASYNC):
        return times
    moved = max(times.weights_s, reading.transfer_s + reading.load_s)
    return replace(times, generation_s=max(times.generation_s, reading.longest_s), weights_s=moved)
