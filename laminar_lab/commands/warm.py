"""`laminar warm`: make the model with which RL would begin, as a folder of its own."""

import os
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from laminar_py.cli import print_line
from laminar_py.config import ConfigError, load_config

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
    kind.make(settings, _Progress().tell)
    partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")  # an interrupted copy is no model
    shutil.copytree(kind.folder(settings), partial)
    partial.rename(out)
    print_line(f"{out}: all weights of {settings.model.path} after {config}'s warm start")
    print_line(f"train from it with model.path={out} model.from_scratch=false warm_start=null")


class _Progress:
    """Prints a line on the steps every few seconds, and at the end."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()

    def tell(self, step: int, steps: int, loss: float) -> None:
        now = time.monotonic()
        if step == 1:  # loading the model is no part of a step
            self._began = now
        elif now - self._told >= EVERY_S or step == steps:
            left_s = (now - self._began) / (step - 1) * (steps - step)
            print_line(f"step {step} of {steps}: loss {loss:.3f}, {left_s:.0f} s left")
            self._told = now
