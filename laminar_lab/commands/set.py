"""`laminar set` and `laminar scale`: change settings of a running run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from laminar_py.cli import print_line

set_app = typer.Typer()
scale_app = typer.Typer()


@set_app.command(epilog="Example: laminar set runs/quickstart-1 staleness.max_staleness=2")
def set_settings(
    run: Annotated[Path, typer.Argument(help="Folder of a running run, e.g. runs/mine-1")],
    settings: Annotated[list[str], typer.Argument(help="Settings as key=value, e.g. staleness.max_staleness=4")],
) -> None:
    """Change settings of a running run: staleness.max_staleness, learner.publish_every, buffer.capacity,
    rollout.replicas and learner.world_size.

    The settings are checked and changed as one. A change takes effect with the learner's next batch, and the run
    prints it. A resume keeps it, and staleness.control leaves what you set. Other settings change by a resume with
    key=value.
    """
    _ask(run, settings)


@scale_app.command(epilog="Example: laminar scale runs/quickstart-1 4")
def scale(
    run: Annotated[Path, typer.Argument(help="Folder of a running run, e.g. runs/mine-1")],
    replicas: Annotated[int, typer.Argument(help="Wanted number of replicas")],
) -> None:
    """Change how many replicas a running run has; short for `laminar set RUN rollout.replicas=N`.

    New replicas join without a stop. Surplus replicas get no new trajectories and end when they are empty. If the
    cluster has no room, replicas wait for a node that Ray adds. The run prints the change.
    """
    _ask(run, [f"rollout.replicas={replicas}"])


def _ask(run: Path, settings: Sequence[str]) -> None:
    """Leave checked settings for the controller of a run. Raises `ConfigError`."""
    from laminar_py.config import ConfigError, load_config
    from laminar_py.config.changes import changed
    from laminar_py.ledger import run_at, settings_on_record, write_wanted

    folder = run_at(run)
    if folder.source.is_file():
        raise ConfigError(f"run={run}: an evaluation, whose settings cannot change; name a run of training")
    changed(load_config(folder.config, settings_on_record(folder, [])), *settings)
    words = " ".join(settings)
    if not folder.is_locked:
        resume = f"laminar train CONFIG --resume {words}"
        raise ConfigError(f"run={run}: no controller runs it; resume it by `{resume}`")
    write_wanted(run, settings)
    print_line(f"{run}: asked for {words}; the run prints the change, also into logs/controller.log")
