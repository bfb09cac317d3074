"""`laminar plan`: rank the placements of a model on a fleet, before the fleet is rented."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from laminar_lab.emulation.settings import EmulationProfile, read_profile
from laminar_py.cli import console, print_line
from laminar_py.config import ConfigError

if TYPE_CHECKING:
    from laminar_lab.plan.inputs import Subject
    from laminar_lab.plan.planner import Ranked, RankedPlan
    from laminar_lab.plan.request import Lengths, PlanRequest

SHOWN = 8  # placements in a ranking
LINE_S = 10.0  # between lines of progress without a terminal
LEGEND = """
learner + replicas x TP: GPUs that train; replicas that generate, GPUs of each
s8: 8 of the replicas share the learner's GPUs, in turns (cluster.share)
admits: responses that a replica begins under one weight version
tokens/s: trained response tokens; step: seconds of a learner step
stale, most: age of trained data in learner steps, the mean and the most
vers. alive: most weight versions in use at a time
binds: the stage to speed up first; 1,000 steps: hours, or a price with --price
"""
GBIT = 1e9 / 8  # bytes
app = typer.Typer()


@app.command(epilog="Example: laminar plan 7B --gpus 8x8xH100 --price 2.5 --write 7b.yaml")
def plan(
    model: Annotated[str, typer.Argument(help="Model folder, config.json, size such as 7B, or config of a run")],
    gpus: Annotated[str | None, typer.Option(help="Fleet: nodes x GPUs of each x kind, e.g. 8x8xH100")] = None,
    run: Annotated[Path | None, typer.Option(help="Run with typical response lengths")] = None,
    p50: Annotated[
        float | None, typer.Option(min=1, help="Median tokens of a response; default: 1500, or cap / 4")
    ] = None,
    p99: Annotated[float | None, typer.Option(min=1, help="Their 99th percentile; default: 10 x p50")] = None,
    cap: Annotated[int | None, typer.Option(min=1, help="Longest response; default: config's, or 16384")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt")] = 400,
    prompts_per_step: Annotated[int | None, typer.Option(min=1, help="Default: the config's, or 128")] = None,
    group_size: Annotated[int | None, typer.Option(min=2, help="Default: the config's, or 16")] = None,
    max_staleness: Annotated[int | None, typer.Option(min=0, help="Steps; default: the config's, or 4")] = None,
    reward_s: Annotated[float, typer.Option(min=0, help="Median seconds from a response to its score")] = 0.05,
    mfu: Annotated[float | None, typer.Option(min=0.01, max=1, help="Of the learner; default: 0.4")] = None,
    profile: Annotated[Path | None, typer.Option(help="Measured times, of `laminar calibrate`")] = None,
    network_gbit: Annotated[float, typer.Option(min=0.1, help="Gbit/s from a node to others")] = 400,
    price: Annotated[float | None, typer.Option(min=0, help="Of a GPU-hour")] = None,
    write: Annotated[Path | None, typer.Option(help="File for the config of the first choice")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Most seconds of simulation; 0: formulas alone")] = 180,
    explain: Annotated[bool, typer.Option("--explain", help="Show each formula with its numbers")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
) -> None:
    """Rank the placements of a run on a fleet, at once by formula, then by simulations (docs/scale.md)."""
    from laminar_lab.plan.inputs import read_fleet, read_subject
    from laminar_lab.plan.request import PlanRequest
    from laminar_lab.plan.writing import refuse_existing
    from laminar_lab.step_time import LEARNER_MFU

    refuse_existing(write)
    subject = read_subject(model)
    request = PlanRequest(
        model=subject.name,
        shape=subject.shape,
        fleet=read_fleet(gpus, network_bytes_per_s=network_gbit * GBIT),
        lengths=_lengths(run, (p50, p99), cap=cap or subject.cap, prompt=prompt, quiet=as_json),
        prompts_per_step=prompts_per_step or subject.prompts_per_step,
        group_size=group_size or subject.group_size,
        max_staleness=subject.max_staleness if max_staleness is None else max_staleness,
        reward_s=reward_s,
        mfu=mfu or LEARNER_MFU,
        price=price,
        measured=_measured(profile, mfu),
        learner=subject.learner,
        shares=subject.shares,
        has_critic=subject.has_critic,
        replay_share=subject.replay_share,
    )
    _print(made := _rank_placements(request, seconds, quiet=as_json), as_json=as_json, explain=explain)
    _write(made, subject, write, quiet=as_json)


def _measured(profile: Path | None, mfu: float | None) -> "EmulationProfile | None":
    if profile is not None and mfu is not None:
        raise ConfigError(f"--mfu={mfu:g}: --profile also has the speed of the learner; leave out one of the two")
    return None if profile is None else read_profile(profile, setting="--profile")


def _rank_placements(request: "PlanRequest", seconds: float, *, quiet: bool) -> "RankedPlan":
    """Rank by formula, then by simulations of `seconds` at most; unless `quiet`, print each ranking."""
    from laminar_lab.plan.judge import Judges
    from laminar_lab.plan.output import describe_workload
    from laminar_lab.plan.planner import make_plan, plan_by_formula

    if seconds and quiet:
        with Judges(request, within_s=seconds) as judges:
            return make_plan(request, judge_all=judges)
    by_formula = plan_by_formula(request)
    if not quiet:
        print_line(describe_workload(request))
        console.print(*_ranking(by_formula), Text(LEGEND, style="dim"), sep="\n")
    if not seconds:
        return by_formula
    print_line(f"Simulations rank the likeliest of them now, in {seconds:g} s at most; Ctrl-C ends them.\n")
    with (
        console.status("") as status,
        Judges(request, within_s=seconds, show=SimulationProgress(seconds, status.update)) as judges,
    ):
        made = make_plan(request, judge_all=judges)
    if made.best.judgement is None:
        more = 4 * max(seconds, 15)
        print_line(
            f"too few simulations ended within {seconds:g} s to rank by them, so the formulas are the answer here;"
            f" --seconds {more:g} gives them more"
        )
    else:
        console.print(*_ranking(made), "", sep="\n")
    return made


class SimulationProgress:
    """Shows how far simulations of `seconds` are: by `update` on a terminal, else as a line now and then."""

    def __init__(self, seconds: float, update: Callable[[str], None]) -> None:
        self._seconds, self._update = seconds, update
        self._began_s = self._printed_s = time.monotonic()

    def __call__(self, judged: int) -> None:
        """Show that `judged` simulations are done."""
        from laminar_lab.plan.planner import MOST

        now_s = time.monotonic()
        passed = f"{now_s - self._began_s:.0f} of {self._seconds:g} s"
        line = f"{judged} simulations done, {MOST} or more to do; {passed}"
        self._update(line)
        if not console.is_terminal and now_s - self._printed_s >= LINE_S:
            self._printed_s = now_s
            print_line(line)


def _lengths(
    run: Path | None, given: tuple[float | None, float | None], *, cap: int, prompt: int, quiet: bool
) -> "Lengths":
    """Return the given lengths, or the lengths in a run's ledger."""
    from laminar_lab.plan.inputs import lengths_by_task, lengths_of_run
    from laminar_lab.plan.request import Lengths

    p50, p99 = given
    if run is None:
        return Lengths.of_percentiles(p50, p99, cap=cap, prompt=prompt)
    if p50 is not None or p99 is not None:
        raise ConfigError(f"--run={run}: the run decides the lengths; leave out --p50 and --p99")
    tasks = lengths_by_task(run)
    if not quiet:
        table = Table("task", "responses", "p50", "p99", "between prompts", title=f"response tokens of {run.name}")
        for one in tasks:
            between = f"{one.prompt_share:.0%} of the variance"
            table.add_row(one.task, f"{one.count:,}", f"{one.p50:,.0f}", f"{one.p99:,.0f}", between)
        console.print(table)
    return lengths_of_run(tasks[0], cap=cap, prompt=prompt)


def _print(plan: "RankedPlan", *, as_json: bool, explain: bool) -> None:
    """Print memory and reasons of a plan, or one JSON object with everything."""
    from laminar_lab.plan.output import describe_plan, make_output

    if as_json:
        print(msgspec.json.encode(make_output(plan)).decode())
        return
    console.print(_memory(plan))
    if explain:
        console.print(_formulas(plan.best))
    for line in describe_plan(plan):
        print_line(line)


def _write(plan: "RankedPlan", subject: "Subject", write: Path | None, *, quiet: bool) -> None:
    """Write the config of the first choice where `write` names a file; print what to do next, unless `quiet`."""
    from laminar_lab.plan.writing import write_config

    if write is not None:
        write_config(plan, plan.best, write, model=subject.folder, base=subject.tree)
    if quiet:
        return
    if write is None:
        print_line("--write FILE writes the config of the first choice")
        return
    fleet = plan.request.fleet
    pretend = f"{fleet.nodes}x{fleet.per_node}x{fleet.gpu.name}"
    print_line(f"the config: {write}; check it with laminar doctor {write} --pretend {pretend}")
    if not (subject.folder / "config.json").is_file():
        print_line(f"put the model into {subject.folder} first")


def _ranking(plan: "RankedPlan") -> tuple[str, Table]:
    """Make the table of the best placements, and its title."""
    table = Table(box=None, pad_edge=False)  # fits 80 columns
    titles = ("", "learner +\nreplicas x TP", "admits", "tokens/s", "step, s", "stale,\nmost", "vers.\nalive")
    for title in (*titles, "binds, by\nformula", "1,000\nsteps"):
        table.add_column(title, no_wrap=True)
    for place, one in enumerate(plan.ranked[:SHOWN], start=1):
        where, cost = one.placement, plan.cost(one)
        aged, alive = "-", "-"
        if one.judgement is not None:
            figures = one.judgement.figures
            aged = f"{figures.staleness_mean:.1f}, {figures.staleness_max}"
            alive = f"{figures.versions_alive_max}"
        cells = (
            str(place),
            f"{where.schedule} {where.learner_gpus}+{where.replicas}x{where.tensor_parallel}"
            + (f" s{where.shared}" if where.shared else ""),
            f"{where.batch_per_replica}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.step_s:.1f}",
            aged,
            alive,
            f"{one.estimate.binds.value}",
            f"{1000 * one.step_s / 3600:,.1f} h" if cost is None else f"{cost:,.0f}",
        )
        table.add_row(*cells, style="bold" if place == 1 else None)
    kind = "by formula" if plan.best.judgement is None else "simulated"
    return f"Placements, {kind}:", table


def _memory(plan: "RankedPlan") -> Table:
    """Make the table of peak GB by part of the first choice: a learner GPU and an engine GPU, or turns on one."""
    from laminar_lab.doctor.memory import KINDS, LEARNERS_TURN, REPLICAS_TURN

    learner, engine = plan.learner_memory(plan.best), plan.engine_memory(plan.best)
    titles = (LEARNERS_TURN, REPLICAS_TURN) if plan.best.placement.shared else KINDS
    table = Table("GB of a GPU, by formula", *titles)
    for name in dict.fromkeys((*learner, *engine)):
        row = [f"{parts[name] / 1e9:.1f}" if name in parts else "-" for parts in (learner, engine)]
        if set(row) - {"-", "0.0"}:
            table.add_row(name, *row)
    table.add_row("all", *(f"{sum(parts.values()) / 1e9:.1f}" for parts in (learner, engine)), style="bold")
    if host := plan.learner_host(plan.best):
        table.add_row("beside it, in the host's memory", f"{host / 1e9:.1f}", "-")
    return table


def _formulas(ranked: "Ranked") -> Table:
    table = Table("formula", "with its numbers", "gives")
    for formula in ranked.estimate.formulas:
        table.add_row(formula.name, formula.text, formula.result)
    return table
