"""`laminar simulate`: simulate a run on other GPUs, with the production policies on a virtual clock."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from laminar_lab.emulation.settings import emulation_of, read_profile
from laminar_py.cli import console, print_line
from laminar_py.config import ConfigError

if TYPE_CHECKING:
    from laminar_lab.emulation.settings import EmulationProfile
    from laminar_lab.simulate.figures import SimulatedFigures
    from laminar_py.config import RunConfig
    from laminar_py.records import StepRow

LINE_EVERY_S = 5.0
app = typer.Typer()


@app.command(epilog="Example: laminar simulate experiments/math_long_cot/7b_8gpu.yaml steps=24 --gpu H100")
def simulate(
    config: Annotated[Path, typer.Argument(help="YAML file of a run: with emulated engines, or any with --gpu")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. rollout.replicas=64")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU of the config's engines and learner, e.g. H100")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Profile of `laminar calibrate`, in place of the times of --gpu")
    ] = None,
    p50: Annotated[
        float | None, typer.Option(min=1, help="Median tokens of a response; default: 1500, or cap / 4")
    ] = None,
    p99: Annotated[float | None, typer.Option(min=1, help="Their 99th percentile; default: 10 x p50")] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt; default: 400")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Keep a run folder, for laminar report, audit and dashboard")
    ] = False,
) -> None:
    """Simulate a run on a virtual clock: production scheduling, repacking and packing, with engines and a learner
    that take the times of the profile, or with --gpu of that GPU's data sheet or of --profile.

    Figures are in emulated seconds, over all steps except the first quarter. `laminar train` runs the same config
    on emulated engines in real time. --record writes runs/simulated-<name>-<n>/, which is marked as simulated.
    """
    from laminar_lab.simulate.record import new_simulated_run
    from laminar_lab.simulate.run import simulate as simulate_run
    from laminar_py.config import load_config

    settings, times = _emulated(load_config(config, overrides or []), gpu, profile, (p50, p99, prompt))
    run = new_simulated_run(settings) if record else None
    began = printed = time.monotonic()

    def show(row: "StepRow") -> None:
        nonlocal printed
        if not as_json and (time.monotonic() - printed > LINE_EVERY_S or row.step == settings.steps):
            printed = time.monotonic()
            print_line(
                f"step {row.step}/{settings.steps}"
                f"  staleness {row.staleness_mean:.1f} max {row.staleness_max or 0}"
                f"  learner waiting {row.learner_waiting_share:.0%}  {printed - began:.0f} s"
            )

    figures = simulate_run(settings, run=run, show=show, profile=times).figures
    if as_json:
        print(msgspec.json.encode(figures).decode())
        return
    console.print(_table(figures))
    if run is not None:
        print_line(f"laminar report {run.path} has all figures, and draws report.html")
        print_line(f"laminar audit {run.path} verify checks the record")


def _emulated(
    settings: "RunConfig",
    gpu: str | None,
    profile: Path | None,
    lengths: tuple[float | None, float | None, int | None],
) -> "tuple[RunConfig, EmulationProfile]":
    """Return a config with emulated engines and its times, or the times of `gpu` or `profile`.

    Settings that the times of `gpu` ignore are named on stderr. Raises `ConfigError`.
    """
    from laminar_lab.gpus import gpu_named
    from laminar_lab.plan.pretend import ignored, pretend
    from laminar_lab.simulate.run import check

    if gpu is not None:
        p50, p99, prompt = lengths
        if line := ignored(settings):
            typer.echo(line, err=True)
        measured = None if profile is None else read_profile(profile, setting="--profile")
        settings, times = pretend(settings, gpu_named(gpu), p50=p50, p99=p99, prompt=prompt, measured=measured)
        check(settings)
        return settings, times
    if profile is not None:
        raise ConfigError(f"--profile={profile}: give --gpu, too; a config of emulated engines names its profile")
    if any(one is not None for one in lengths):
        raise ConfigError(
            "--p50, --p99, --prompt: the config's engines have lengths of their own; give --gpu, too"
        )
    check(settings)
    return settings, read_profile(emulation_of(settings).profile)  # a mistake there leaves no run folder


def _control_rates(figures: "SimulatedFigures") -> str:
    rates = (figures.trajectories_per_s, figures.events_per_s, figures.reports_per_s)
    return ", ".join(f"{rate:,.0f}" for rate in rates)


def _table(figures: "SimulatedFigures") -> Table:
    """Make the table that `laminar simulate` prints, of steps after the fleet has filled."""
    table = Table("simulated, of a step once under way", "")
    for name, value in (
        ("trained tokens/s", f"{figures.trained_tokens_per_s:,.0f}"),
        ("generated tokens/s", f"{figures.generated_tokens_per_s:,.0f}"),
        ("seconds", f"{figures.step_s:.1f}"),
        ("learner waits for a batch", f"{figures.learner_waiting_share:.0%}"),
        ("KV caches in use", f"{figures.kv_use:.0%}"),
        ("staleness, steps", f"{figures.staleness_mean:.2f}, at most {figures.staleness_max}"),
        ("versions alive", f"at most {figures.versions_alive_max}"),
        ("failures of replicas", f"{figures.failures}"),
        ("response, s", f"p50 {figures.latency_p50_s:.0f}, p95 {figures.latency_p95_s:.0f}"),
        ("trajectories that end, events, reports a second", _control_rates(figures)),
    ):
        table.add_row(name, value)
    return table
