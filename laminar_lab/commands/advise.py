"""`laminar advise`: settings to change against the bottleneck of a run, with their predicted gains."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laminar_py.cli import console, print_line

if TYPE_CHECKING:
    from laminar_lab.report.mean_step import MeanStep

NAMES = {"generation": "the replicas", "reward": "the scorers", "learner": "the learner ranks"}
LEAST_S = 0.005  # of a stage, below which a prediction says nothing
app = typer.Typer()


@app.command(epilog="Example: laminar advise runs/quickstart-1")
def advise(run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")]) -> None:
    """Say what to change first against what limits a run, and predict a step with other settings and schedules."""
    from laminar_lab.advice import advise_changes
    from laminar_lab.report.figures import handed_over_share
    from laminar_lab.report.run_report import read_report
    from laminar_lab.report.tails import format_seconds
    from laminar_lab.report.terminal import learning_lines, make_table

    report = read_report(run)
    diagnosis, config = report.diagnosis, report.snapshot.config
    if diagnosis is None or config is None:
        print_line("no learner step was completed, so what limits the run is unknown")
        return
    step = diagnosis.mean_step
    for line in learning_lines(report.learning):
        print_line(line)
    print_line(f"limited by {diagnosis.verdict}: {diagnosis.evidence}")
    print_line(
        f"a step takes {format_seconds(step.measured_s)}; the tables have the goodput that a change would give"
    )
    advice = advise_changes(diagnosis, config, handed_over=handed_over_share(report) or 0.0)
    if advice.gains:
        rows = [(one.key, one.change, f"at most {gain:.2f} x", one.why) for one, gain in advice.gains]
        console.print(
            make_table("\nWhat to change, the best first", "setting", ("change", "goodput", "why"), rows)
        )
    else:
        print_line(advice.without)
    predicted = [
        (change, format_seconds(step_s), f"{step.measured_s / step_s:.2f} x") for change, step_s in _what_ifs(step)
    ]
    console.print(make_table("\nOther runs", "with", ("a step", "goodput"), predicted))


def _what_ifs(step: "MeanStep") -> Iterator[tuple[str, float]]:
    """Yield predicted seconds of a step with twice as much of a stage, and under other schedules."""
    from laminar_lab.advice import steps_under, what_if
    from laminar_lab.report.mean_step import StepStage

    for stage, name in NAMES.items():
        if step.times.seconds_of(StepStage(stage)) >= LEAST_S:
            yield f"twice {name}", what_if(step, StepStage(stage))
    for schedule, (step_s, stage) in steps_under(step).items():
        if schedule is not step.schedule and not step.in_turns:
            yield f"schedule={schedule} (most of it {stage})", step_s
