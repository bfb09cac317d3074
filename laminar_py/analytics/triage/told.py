"""A diagnosis in words: what `laminar train` prints at its end and `laminar report` at its beginning. Pure."""

from collections.abc import Iterator

from laminar_py.analytics.triage.goodput import Stage
from laminar_py.analytics.triage.reading import Reading
from laminar_py.analytics.triage.triage import Diagnosis, what_if
from laminar_py.config.staleness import Schedule

NO_STEP = "no learner step was completed, so what limits the run cannot be told"
SMALL = 0.005  # seconds that are not worth a word
NEXT_MOVES = 2
HOW = {
    Schedule.SYNC: "one after another",
    Schedule.ONE_STEP: "a batch ahead",
    Schedule.ASYNC: "side by side",
}


def tell(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Rows of a heading and a line."""
    binding, reading = diagnosis.binding, diagnosis.reading
    yield "limited by", f"{str(binding.wall).upper()}: {binding.evidence}"
    first, *others = binding.remedies
    yield "change first", str(first)
    if others:
        yield "or instead", ", or ".join(f"{move.key} {move.change}" for move in others[:NEXT_MOVES])
    following = diagnosis.next
    yield "without it", f"{_gain(binding.gain)}; then {following.wall} limits, now: {following.evidence}"
    stages = f"its stages, {HOW[reading.schedule]} (schedule={reading.schedule}): {_stages(reading)}"
    yield "a step", f"takes {reading.measured_s:.2f} s; {stages}"
    twice = ", ".join(_twice(reading))
    if twice:
        yield "it would take", f"with twice {twice}"
    others_s = (schedule for schedule in Schedule if schedule is not reading.schedule)
    words = (f"schedule={s} {diagnosis.under[s]:.2f} s (most of it {diagnosis.walls_under[s]})" for s in others_s)
    yield "", f"with {', with '.join(words)}"


def _gain(gain: float) -> str:
    times = f"at most {gain:.2f} x" if gain < 100 else "more than 100 x"
    return f"{times} the goodput (useful trained tokens per second)"


def _stages(reading: Reading) -> str:
    times = {stage: reading.times.of(stage) for stage in Stage}
    shown = {stage: f"{stage} {seconds:.2f} s" for stage, seconds in times.items() if seconds >= SMALL}
    if Stage.GENERATION in shown and reading.times.tail_s >= SMALL:
        shown[Stage.GENERATION] += f" ({reading.times.tail_s:.2f} s of it with the last few responses)"
    if Stage.LEARNER in shown and reading.reference_in_learner and reading.reference_s >= SMALL:
        shown[Stage.LEARNER] += f" ({reading.reference_s:.2f} s of it the reference model)"
    return ", ".join(shown.values()) or f"none takes {SMALL} s"


def _twice(reading: Reading) -> Iterator[str]:
    names = {Stage.GENERATION: "the replicas", Stage.REWARD: "the scorers", Stage.LEARNER: "the learner ranks"}
    for stage, name in names.items():
        if reading.times.of(stage) >= SMALL:
            yield f"{name} {what_if(reading, stage):.2f} s"
