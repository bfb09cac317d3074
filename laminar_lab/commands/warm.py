"""`laminar warm`: make the model with which RL would begin, as a folder of its own."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laminar_py.cli import print_line
from laminar_py.config import ConfigError, load_config
from laminar_py.records.host import SystemClock

if TYPE_CHECKING:
    from laminar_py.config.warm_start import OnStep
    from laminar_py.records.host import Clock

EVERY_S = 5.0  # between lines on the progress
WHOLE = (
    "learner.lora=null"  # a warm start trains all weights, also for a run whose engines refuse it with adapters
)
app = typer.Typer()


@app.command(epilog="Example: laminar warm mine.yaml mine/warm")
def warm(
    config: Annotated[Path, typer.Argument(help="YAML file with the sections warm_start and model")],
    out: Annotated[Path, typer.Argument(help="New folder")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings, e.g. warm_start.steps=200 warm_start.lr=5e-5")
    ] = None,
) -> None:
    """Train all weights on the demonstrations of `warm_start`, and write the model to a folder.

    For a run that cannot warm-start itself: adapters on SGLang servers, or several runs from one folder.
    """
    from laminar_py.runtime.preflight import check_warm_start, prepare

    settings = load_config(config, [*(overrides or ()), WHOLE])
    if settings.warm_start is None:
        raise ConfigError(f"config={config}: has no warm_start; add its section, or use model.path as it is")
    if out.exists():
        raise ConfigError(f"out={out}: exists; name a new folder")
    prepare(settings)
    kind = check_warm_start(settings)
    kind.make(settings, _print_progress(SystemClock()))
    partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")  # an interrupted copy is no model
    shutil.copytree(kind.folder(settings), partial)
    partial.rename(out)
    print_line(f"{out}: all weights of {settings.model.path} after {config}'s warm start")
    print_line(f"train from it with model.path={out} model.from_scratch=false warm_start=null")


def _print_progress(clock: "Clock") -> "OnStep":
    """Return a function that prints a line on the steps every few seconds, and at the end."""
    from laminar_py.observe import Pace

    pace, told_s = Pace(clock), clock.now()

    def show(step: int, steps: int, loss: float) -> None:
        nonlocal told_s
        left = pace.describe("steps", step, steps)  # from the first step on, since loading is no part of it
        if clock.now() - told_s >= EVERY_S or step == steps:
            print_line(f"step {step} of {steps}: loss {loss:.3f}{left}")
            told_s = clock.now()

    return show
