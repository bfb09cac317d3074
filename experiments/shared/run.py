"""Shared GPUs against separate ones, simulated: 1, 2, 4 and 8 GPUs of a 7B, and fleets drawn by seed.

`python experiments/shared/run.py [--json] [--drawn N] [--only NAME] [--every]` simulates the missing cells, lets
the planner choose, and keeps both in `.cache/shared`. `--drawn` adds so many drawn fleets, on which the planner
alone is judged. `--every` prints all cells.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path

from fleets import ROWS, Cell, Choice, Fleet, cells_of, choose, drawn_fleet, simulate_cell

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import KeptResults, make_parser
from laminar_lab.simulate.figures import SimulatedFigures

HERE = Path(__file__).parent
KEPT = Path(".cache/shared")
SEED = 0
Figures = Mapping[Cell, SimulatedFigures]


def measure(named: tuple[str, Cell | Fleet]) -> SimulatedFigures | Choice:
    """Simulate a cell or choose for a fleet, or read what is kept of it."""
    name, what = named
    kept = KeptResults(KEPT, sources=[HERE / "fleets.py"], settings=f"seed {SEED}")
    if isinstance(what, Fleet):
        return kept.get(name, Choice, lambda: choose(what.request))
    return kept.get(name, SimulatedFigures, lambda: simulate_cell(what, seed=SEED))


def cell_rows(fleet: Fleet, found: Figures, *, every: bool) -> Iterator[Row]:
    """Make the rows of a fleet's cells: the fastest of each kind, or all."""
    what = f"{describe(fleet)}, seed {SEED}"
    fastest = [best(found, shared=True), best(found, shared=False)]
    for cell in found if every else filter(None, fastest):
        figures = found[cell]
        condition = (
            f"{what}; step {figures.step_s:.1f} s, learner waits {figures.learner_waiting_share:.0%}, hand-overs"
            f" {figures.handed_over_share:.3f} of the time, prefills of dropped caches"
            f" {figures.recomputed_share:.3f},"
            f" {figures.turns} turns in {figures.steps} steps, staleness {figures.staleness_mean:.1f},"
            f" {figures.staleness_max}"
        )
        yield Row(f"{fleet.name}_{cell.name}", figures.trained_tokens_per_s, "trained tokens/s", condition)
    turns = next((cell for cell in found if cell.turns), None)
    if turns and fastest[0]:
        ratio = found[fastest[0]].trained_tokens_per_s / found[turns].trained_tokens_per_s
        yield Row(f"shared_over_turns_{fleet.name}", ratio, "x", f"{what}; {fastest[0].name}")


def best(found: Figures, *, shared: bool) -> Cell | None:
    """Return the fastest cell; None if there is none."""
    cells = [cell for cell in found if bool(cell.placement.shared) is shared and not cell.turns]
    return max(cells, key=lambda cell: found[cell].trained_tokens_per_s, default=None)


def describe(fleet: Fleet) -> str:
    """Describe a fleet in one phrase."""
    trains = "adapter" if fleet.adapter else "all weights"
    return f"{fleet.model}, {trains}, {fleet.gpus} GPUs, {8 * fleet.prompts} a step, p50 {fleet.p50:.0f}"


def choice_rows(chosen: Mapping[Fleet, Choice], kind: str) -> Iterator[Row]:
    """Make the rows of the planner's choices, and how often and how far they are right."""
    for fleet, one in chosen.items():
        ratio = one.shared / one.split if one.split else 0.0
        said = f"shares: formula {one.formula_shares}, plan {one.plan_shares}"
        reached = f"formula {one.formula / one.best:.3f}, plan {one.plan / one.best:.3f} of the better one"
        yield Row(
            f"shared_over_split_{fleet.name}", ratio, "x, 0: no split", f"{describe(fleet)}; {said}; {reached}"
        )
    number = f"{len(chosen)} {kind} fleets"
    for name in ("formula", "plan"):
        right = [getattr(one, f"{name}_shares") == (one.shared >= one.split) for one in chosen.values()]
        reached = [getattr(one, name) / one.best for one in chosen.values()]
        yield Row(f"{kind}_{name}_right", sum(right) / len(right), "share", number)
        yield Row(f"{kind}_{name}_least", min(reached), "x", f"{number}, its first choice over the better kind")


def report(fleets: Sequence[Fleet], *, every: bool) -> list[Row]:
    """Simulate what is missing, and return all rows."""
    of_cells = [(fleet, cell) for fleet in fleets if fleet in ROWS for cell in cells_of(fleet.request)]
    work: list[tuple[str, Cell | Fleet]] = [(f"{fleet.name}-{cell.name}", cell) for fleet, cell in of_cells]
    work += [(fleet.name, fleet) for fleet in fleets]
    figures: dict[Fleet, dict[Cell, SimulatedFigures]] = {}
    chosen: dict[Fleet, Choice] = {}
    with get_context("spawn").Pool(min(len(work), os.cpu_count() or 1)) as pool:
        found = pool.imap(measure, work)
        for (fleet, cell), of_cell in zip(of_cells, found, strict=False):
            figures.setdefault(fleet, {})[cell] = of_cell
        chosen.update(zip(fleets, found, strict=True))
    made = [row for fleet, cells in figures.items() for row in cell_rows(fleet, cells, every=every)]
    for kind in ("named", "drawn"):
        some = {fleet: one for fleet, one in chosen.items() if (fleet in ROWS) is (kind == "named")}
        made += choice_rows(some, kind) if some else ()
    return made


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
