"""`laminar calibrate`: measure a run's engine and learner on this machine, and write a profile for simulations."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from laminar_py.cli import console, print_line

if TYPE_CHECKING:
    from laminar_lab.calibration.profile import Calibration
app = typer.Typer()


@app.command(epilog="Example: laminar calibrate configs/quickstart.yaml --out profile.yaml")
def calibrate(
    config: Annotated[Path, typer.Argument(help="YAML file of a run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. rollout.max_batch=64")] = None,
    out: Annotated[Path, typer.Option(help="Profile to write, for rollout.engine.profile")] = Path("profile.yaml"),
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians")] = 5,
) -> None:
    """Measure the engine, the learner and the relay of a run on this machine, each alone, and write a profile that
    `laminar plan --profile`, `laminar simulate` and emulated runs read.

    Takes a minute for a small model. The machine should be idle otherwise.
    """
    from laminar_lab.bench.report import machine
    from laminar_lab.calibration.profile import calibrate as measure
    from laminar_lab.calibration.profile import refuse_unwritable, write_profile
    from laminar_py.config import load_config
    from laminar_py.records import EngineLostError
    from laminar_py.runtime.cluster import RunFailedError
    from laminar_py.runtime.preflight import prepare

    refuse_unwritable(out)
    settings = load_config(config, overrides or [])
    prepare(settings)
    try:
        found = measure(settings, repeats=repeats, log=lambda line: print_line(line, style="dim"))
    except EngineLostError as error:
        raise RunFailedError(f"the engine is lost: {error}; mend that, and calibrate again") from None
    command = " ".join([str(config), *(overrides or [])])
    write_profile(found, out, measured=f"{command}, median of {repeats}, {machine()}")
    console.print(_errors(found))
    console.print(_rates(found))
    for warning in found.warnings:
        print_line(warning, style="yellow")
    print_line(f"{out} has the profile; a config with kind: emulated uses it with rollout.engine.profile={out}")


def _rates(found: "Calibration") -> Table:
    table = Table("measured", "ms", "GB/s", title=f"a version of {found.version_bytes / 1e9:.3g} GB")
    for name, took_s, rate in found.rates:
        table.add_row(name, f"{1000 * took_s:.3g}", f"{rate / 1e9:.3g}")
    return table


def _errors(found: "Calibration") -> Table:
    table = Table("measured", "ms", "the profile says", "off by", title="fit of the profile")
    for name, fit in (("decode step", found.engine), ("learner step", found.learner)):
        for one, error in zip(fit.observations, fit.errors, strict=True):
            said_ms = 1000 * fit.seconds(one.terms)
            table.add_row(f"{name}, {one.name}", f"{1000 * one.seconds:.3g}", f"{said_ms:.3g}", f"{error:+.0%}")
        table.add_section()
    return table
