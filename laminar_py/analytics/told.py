"""A diagnosis in words: what `laminar train` prints at its end and `laminar report` at its beginning. Pure."""

from collections.abc import Iterator

from laminar_py.analytics.goodput import Stage
from laminar_py.analytics.reading import Reading
from laminar_py.analytics.triage import Diagnosis, what_if
from laminar_py.config import Schedule

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
        yield "or", "; ".join(f"{move.key} {move.change}" for move in others[:NEXT_MOVES])
    yield "gains", f"{_gain(binding.gain)}; the next wall is {diagnosis.next.wall}: {diagnosis.next.evidence}"
    yield "a step", f"{reading.measured_s:.2f} s: {_stages(reading)}, {HOW[reading.schedule]}"
    yield "with twice", ", ".join(_twice(reading))
    others_s = (schedule for schedule in Schedule if schedule is not reading.schedule)
    yield (
        "a step under",
        ", ".join(f"{s} {diagnosis.under[s]:.2f} s (most: {diagnosis.walls_under[s]})" for s in others_s)
        + ", as predicted",
    )


def _gain(gain: float) -> str:
    return f"at most {gain:.2f} x the goodput" if gain < 100 else "more than 100 x the goodput"


def _stages(reading: Reading) -> str:
    times = {str(stage): reading.times.of(stage) for stage in Stage}
    shown = [f"{name} {seconds:.2f}" for name, seconds in times.items() if seconds >= SMALL]
    if reading.times.tail_s >= SMALL:
        shown[0] += f" ({reading.times.tail_s:.2f} in its tail)"
    if reading.reference_in_learner and reading.reference_s >= SMALL:
        shown.append(f"reference {reading.reference_s:.2f} inside the learner")
    return ", ".join(shown)


def _twice(reading: Reading) -> Iterator[str]:
    names = {Stage.GENERATION: "the replicas", Stage.REWARD: "the scorers", Stage.LEARNER: "the learner ranks"}
    for stage, name in names.items():
        if reading.times.of(stage) >= SMALL:
            yield f"{name} {what_if(reading, stage):.2f} s"
