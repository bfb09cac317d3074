"""`laminar advise`: settings to change against the wall of a run, with their predicted gains."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laminar_py.cli import console, print_line

if TYPE_CHECKING:
    from laminar_py.observe import MeanStep

NAMES = {"generation": "the replicas", "reward": "the scorers", "learner": "the learner ranks"}
LEAST_S = 0.005  # of a stage, below which a prediction says nothing
app = typer.Typer()


@app.command(epilog="Example: laminar advise runs/quickstart-1")
def advise(run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")]) -> None:
    """Say what to change first against what limits a run, and predict a step with other settings and schedules."""
    from laminar_lab.advice.predictions import choices, train_command
    from laminar_lab.advice.remedies import remedies
    from laminar_py.observe import format_seconds, make_table, read_report

    report = read_report(run)
    diagnosis, config = report.diagnosis, report.snapshot.config
    if diagnosis is None or config is None:
        print_line("no learner step was completed, so what limits the run is unknown")
        return
    wall, step = diagnosis.binding.wall, diagnosis.mean_step
    print_line(f"limited by {str(wall).upper()}: {diagnosis.binding.evidence}")
    rows = [(remedy.key, remedy.change, remedy.why) for remedy in remedies(wall, config, step)]
    console.print(make_table("\nWhat to change, the best first", "setting", ("change", "why"), rows))
    rows = [
        (change, format_seconds(step_s), f"{step.measured_s / step_s:.2f} x") for change, step_s in _what_ifs(step)
    ]
    title = f"\nA step takes {format_seconds(step.measured_s)}. It would take"
    console.print(make_table(title, "with", ("a step", "goodput"), rows))
    file = Path(report.config_file)
    best = choices(diagnosis, config, file=file)
    if best:
        print_line(f"\nthe best by these predictions, since {best[0].why}:")
        print_line(train_command(best[0], file=file))


def _what_ifs(step: "MeanStep") -> Iterator[tuple[str, float]]:
    """Yield predicted seconds of a step with twice as much of a stage, and under other schedules."""
    from laminar_lab.advice.predictions import steps_under, what_if
    from laminar_py.observe import StepStage

    for stage, name in NAMES.items():
        if step.times.seconds_of(StepStage(stage)) >= LEAST_S:
            yield f"twice {name}", what_if(step, StepStage(stage))
    for schedule, (step_s, stage) in steps_under(step).items():
        if schedule is not step.schedule:
            yield f"schedule={schedule} (most of it {stage})", step_s
