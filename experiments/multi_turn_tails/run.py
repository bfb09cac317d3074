"""Turns and their tails: the loss of each schedule where environments work between the turns of the model.

`python experiments/multi_turn_tails/run.py [--json] [--quick]` simulates `async` with repacking,
`one_step` and colocated `sync` on equal devices, with responses of one turn and of eight, of as many tokens of the
model. Cells that are done are kept in `.cache/multi_turn_tails`. `--quick`: one fleet and one seed.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median

from fleets import ASYNC, CONFIG, FLEETS, TAIL, TURNS, Baseline, Cell, Fleet, measure, turns_name

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import KeptResults, make_parser
from laminar_lab.simulate.figures import SimulatedFigures

HERE = Path(__file__).parent
KEPT = Path(".cache/multi_turn_tails")
SEEDS = (0, 1, 2)
ASKED, BESIDE = (Baseline.SYNC, Baseline.ONE_STEP), (Baseline.STREAM, Baseline.PARTIAL)
LATENCY_S, SLOW_S = 2.0, 10.0  # medians; the second beside the first, with one seed
Measured = Callable[[Cell], SimulatedFigures]


class Comparison:
    """Figures over fleets, by seed."""

    def __init__(self, measured: Measured, *, fleets: Sequence[Fleet], seeds: Sequence[int]) -> None:
        self._measured = measured
        self._fleets = fleets
        self._seeds = seeds
        self._held = 0  # slots, in any cell so far

    def rows(self) -> Iterator[Row]:
        """Make the rows of the gains of turns first, then their parts."""
        for arm in ASKED:
            yield from self._gain(arm, LATENCY_S, self._seeds)
        for arm in ASKED:
            yield from self._gain(arm, SLOW_S, self._seeds[:1])
        for arm in BESIDE:
            yield from self._gain(arm, LATENCY_S, self._seeds[:1])
        for fleet in self._fleets:
            for latency_s in (None, LATENCY_S, SLOW_S):
                for name in (ASYNC, *ASKED):
                    yield from self._figures(name, fleet, latency_s)
        conditions = "engines of all cells, looked at every 5 s and after each step"
        yield Row("turns_slots_held_waiting", self._held, "slots at most", conditions)

    def _gain(self, arm: Baseline, latency_s: float, seeds: Sequence[int]) -> Iterator[Row]:
        """`async` over another schedule, with turns, with one, and the first over the second."""
        slow = "_slow" * (latency_s == SLOW_S)
        turns = f"{TURNS} turns, latency p50 {latency_s:g} s, p95 {TAIL * latency_s:g} s"
        many, one = self._over(arm, latency_s, seeds), self._over(arm, None, seeds)
        gains = [a / b for a, b in zip(many, one, strict=True)]
        name = "turns_gain_over_single" if arm is Baseline.SYNC else f"turns_gain_over_single_against_{arm}"
        yield self._row(f"{name}{slow}", gains, f"{turns}, over one turn", seeds)
        for fleet in self._fleets:
            of_fleet = [
                self._ratio(arm, fleet, latency_s, seed) / self._ratio(arm, fleet, None, seed) for seed in seeds
            ]
            yield self._row(f"{name}{slow}_{fleet.gpus}", of_fleet, f"{turns}, over one turn", seeds)
        yield self._row(f"turns_async_over_{arm}{slow}", many, turns, seeds)
        if not slow:
            yield self._row(f"single_async_over_{arm}", one, "one turn", seeds)

    def _over(self, arm: Baseline, latency_s: float | None, seeds: Sequence[int]) -> list[float]:
        """[seeds] trained tokens a second of `async` over another, the geometric mean over fleets."""
        return [
            geometric_mean([self._ratio(arm, fleet, latency_s, seed) for fleet in self._fleets]) for seed in seeds
        ]

    def _ratio(self, arm: Baseline, fleet: Fleet, latency_s: float | None, seed: int) -> float:
        ours, other = (self._figures_of(name, fleet, latency_s, seed) for name in (ASYNC, arm))
        return ours.trained_tokens_per_s / other.trained_tokens_per_s

    def _figures_of(self, arm: str, fleet: Fleet, latency_s: float | None, seed: int) -> SimulatedFigures:
        found = self._measured(Cell(arm=arm, fleet=fleet, latency_s=latency_s, seed=seed))
        self._held = max(self._held, found.slots_held_waiting)
        return found

    def _row(self, name: str, values: Sequence[float], setting: str, seeds: Sequence[int]) -> Row:
        conditions = f"{setting}; seeds {', '.join(map(str, seeds))}: {min(values):.3f} to {max(values):.3f}"
        return Row(name, median(values), "x", conditions)

    def _figures(self, arm: str, fleet: Fleet, latency_s: float | None) -> Iterator[Row]:
        """Speed and latencies of a cell, median over seeds."""
        seeds = self._seeds[:1] if latency_s == SLOW_S else self._seeds
        found = [self._figures_of(arm, fleet, latency_s, seed) for seed in seeds]
        where, conditions = (
            f"{arm}_{turns_name(latency_s)}_{fleet.gpus}",
            f"median of seeds {', '.join(map(str, seeds))}",
        )
        for name, unit in (
            ("trained_tokens_per_s", "tokens/s of a quarter of the fleet"),
            ("latency_p50_s", "s"),
            ("latency_p95_s", "s"),
            ("step_s", "s"),
            ("learner_waiting_share", ""),
            ("kv_use", "of KV caches"),
            ("staleness_mean", "steps"),
            ("away", "trajectories, mean"),
        ):
            yield Row(f"{name}_{where}", median(getattr(one, name) for one in found), unit, conditions)


def main() -> None:
    """Measure the missing cells and report."""
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one fleet and one seed")
    args = parser.parse_args()
    profile = Path("configs/emulation/h100_7b_tp1.yaml")
    sources = [HERE / "fleets.py", HERE.parent / "paper/baselines.py", CONFIG, profile]
    kept = KeptResults(KEPT, sources=sources, settings="")

    def measured(cell: Cell) -> SimulatedFigures:
        return kept.get(cell.name, SimulatedFigures, lambda: measure(cell))

    fleets, seeds = (FLEETS[:1], SEEDS[:1]) if args.quick else (FLEETS, SEEDS)
    rows = list(Comparison(measured, fleets=fleets, seeds=seeds).rows())
    show("multi_turn_tails", rows, as_json=args.json)


if __name__ == "__main__":
    main()
