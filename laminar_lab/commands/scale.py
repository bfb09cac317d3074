"""`laminar scale`: set how many replicas a running run has."""

from pathlib import Path
from typing import Annotated

import typer

from laminar_py.cli import print_line
from laminar_py.records.host import counted

app = typer.Typer()


@app.command(epilog="Example: laminar scale runs/quickstart-1 4")
def scale(
    run: Annotated[Path, typer.Argument(help="Folder of a running run, e.g. runs/mine-1")],
    replicas: Annotated[int, typer.Argument(help="Wanted number of replicas")],
) -> None:
    """Change how many replicas a running run has.

    New replicas join without a stop. Surplus replicas get no new trajectories and end when they are empty. If the
    cluster has no room, replicas wait for a node that Ray adds. The run prints the change.
    """
    from laminar_py.config import ConfigError
    from laminar_py.config.loading import load_config, scaled
    from laminar_py.ledger import fleet_on_record, run_at, write_wanted

    folder = run_at(run)
    if folder.source.is_file():
        raise ConfigError(f"run={run}: an evaluation, whose replicas cannot change; name a run of training")
    scaled(load_config(folder.config, fleet_on_record(folder, [])), replicas)
    if not folder.is_locked:
        resume = f"laminar train CONFIG --resume rollout.replicas={replicas}"
        raise ConfigError(f"run={run}: no controller runs it; resume it by `{resume}`")
    write_wanted(run, replicas)
    print_line(
        f"{run}: asked for {counted(replicas, 'replica')}; the run prints the change, also into"
        " logs/controller.log"
    )
