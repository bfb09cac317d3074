"""Shared GPUs against separate ones, simulated: 1, 2, 4 and 8 GPUs of a 7B, and fleets drawn by seed.

`python experiments/shared/run.py [--json] [--drawn N] [--only NAME] [--every]` simulates the missing cells and
keeps them in `.cache/shared`. `--drawn` also simulates so many drawn fleets, on which the rule is judged.
`--every` prints all cells.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from fleets import ROWS, Cell, Fleet, drawn_fleet, shared_cells, simulate_cell, split_cells, turns_cell
from formula import shared_is_better

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import KeptResults, make_parser
from laminar_lab.simulate.figures import SimulatedFigures
from laminar_py.config.cluster import LeaseSwitch
from laminar_py.config.rollout import Schedule

HERE = Path(__file__).parent
KEPT = Path(".cache/shared")
SEED = 0
ASYNC = (Schedule.ASYNC,)
Figures = Mapping[Cell, SimulatedFigures]


def cells_of(fleet: Fleet) -> list[Cell]:
    """Return the cells of a fleet: all policies in the rows of the 7B, the best few by formula in drawn fleets."""
    request, ready = fleet.request, (LeaseSwitch.READY,)
    if fleet.name.startswith("drawn"):
        few = [
            *split_cells(request, each=1, retracting=0),
            *shared_cells(request, each=1, switches=ready, schedules=ASYNC),
        ]
        return [replace(cell, is_whole=False) for cell in few if "sync_" not in cell.name.replace("async_", "")]
    schedules = tuple(Schedule) if fleet.gpus == 1 else (Schedule.ASYNC, Schedule.SYNC)
    found = [
        *split_cells(request, each=2, retracting=1),
        *shared_cells(request, each=2, switches=tuple(LeaseSwitch), schedules=schedules),
    ]
    return [*found, turns_cell(request)] if fleet.gpus == 1 else found


def measure(named: tuple[str, Cell]) -> SimulatedFigures:
    """Simulate a cell, or read what is kept of it."""
    name, cell = named
    kept = KeptResults(KEPT, sources=[HERE / "fleets.py"], settings=f"seed {SEED}")
    return kept.get(name, SimulatedFigures, lambda: simulate_cell(cell, seed=SEED))


def best(found: Figures, *, shared: bool) -> Cell | None:
    """Return the fastest cell; None if there is none."""
    cells = [cell for cell in found if cell.is_shared is shared and not cell.turns]
    return max(cells, key=lambda cell: found[cell].trained_tokens_per_s, default=None)


def rows(fleet: Fleet, found: Figures, *, every: bool) -> Iterator[Row]:
    """Make the rows of a fleet."""
    what = f"{fleet.model}, {'adapter' if fleet.adapter else 'all weights'}, {fleet.gpus} GPUs, seed {SEED}"
    shared, split = best(found, shared=True), best(found, shared=False)
    other = split or next((cell for cell in found if cell.turns), None)
    for cell in found if every else filter(None, (shared, other)):
        figures = found[cell]
        condition = (
            f"{what}; step {figures.step_s:.1f} s, learner waits {figures.learner_waiting_share:.0%}, hand-overs"
            f" {figures.handed_over_share:.3f} of the time, prefills of dropped caches"
            f" {figures.recomputed_share:.3f},"
            f" {figures.turns} turns in {figures.steps} steps, staleness {figures.staleness_mean:.1f},"
            f" {figures.staleness_max}"
        )
        yield Row(f"{fleet.name}_{cell.name}", figures.trained_tokens_per_s, "trained tokens/s", condition)
    if shared and other:
        ratio = found[shared].trained_tokens_per_s / found[other].trained_tokens_per_s
        over = "split" if split else "turns"
        yield Row(f"shared_over_{over}_{fleet.name}", ratio, "x", f"{what}; {shared.name} over {other.name}")


def judge_rule(found: Mapping[Fleet, Figures]) -> Iterator[Row]:
    """Compare the rule's choice with the simulations of drawn fleets."""
    right, lost = [], []
    for fleet, figures in found.items():
        shared, split = best(figures, shared=True), best(figures, shared=False)
        speeds = {
            True: figures[shared].trained_tokens_per_s if shared else 0.0,
            False: figures[split].trained_tokens_per_s if split else 0.0,
        }
        chosen = shared_is_better(fleet.request)
        right.append(speeds[chosen] >= speeds[not chosen])
        lost.append(speeds[chosen] / max(speeds.values()))
        what = f"{fleet.model} on {fleet.gpus} GPUs, adapter {fleet.adapter}, p50 {fleet.p50:.0f}, cap {fleet.cap}"
        ratio = speeds[True] / speeds[False] if speeds[False] else 0.0
        yield Row(
            f"shared_over_split_{fleet.name}", ratio, "x, 0: no split", f"{what}; rule says shared: {chosen}"
        )
    yield Row("rule_right", sum(right) / len(right), "share", f"{len(right)} drawn fleets")
    yield Row("rule_least", min(lost), "x", "of the better one, by the choice of the rule")


def report(fleets: Sequence[Fleet], *, every: bool) -> list[Row]:
    """Simulate what is missing, and return all rows."""
    work = [(fleet, cell) for fleet in fleets for cell in cells_of(fleet)]
    named = [(f"{fleet.name}-{cell.name}", cell) for fleet, cell in work]
    found: dict[Fleet, dict[Cell, SimulatedFigures]] = {}
    with get_context("spawn").Pool(min(len(named), os.cpu_count() or 1)) as pool:
        for (fleet, cell), figures in zip(work, pool.imap(measure, named), strict=True):
            found.setdefault(fleet, {})[cell] = figures
    drawn = {fleet: figures for fleet, figures in found.items() if fleet.name.startswith("drawn")}
    made = [
        row for fleet, figures in found.items() if fleet not in drawn for row in rows(fleet, figures, every=every)
    ]
    return made + list(judge_rule(drawn) if drawn else ())


def main() -> None:
    """Report the rows that are asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--drawn", type=int, default=0, help="fleets drawn by seed")
    parser.add_argument("--only", help="name of a fleet, e.g. 1_adapter")
    parser.add_argument("--every", action="store_true", help="print all cells")
    args = parser.parse_args()
    fleets = [*ROWS, *map(drawn_fleet, range(args.drawn))]
    wanted = [fleet for fleet in fleets if args.only in (None, fleet.name)]
    show("shared", report(wanted, every=args.every), as_json=args.json)


if __name__ == "__main__":
    main()
