"""The comparison of the Laminar paper (arXiv 2510.12633) in the simulator: its schedules, repack and staleness.

`python experiments/paper/run.py [--json] [--quick]` simulates each schedule at 7B, 32B and 72B on fleets of 64 to
1,024 GPUs, under each split of `parameters.yaml` at the lower tensor parallelism and at the middle split under the
higher one, and prints the middle of each band with the band and the paper's figure beside it. Cells that are done
are kept in `.cache/paper`; all take about 20 minutes of a core. `--quick`: one fleet, one placement, a minute.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Self

from cells import BASE, HERE, Arm, Cell, CellFigures, Parameters, measure, read_parameters

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import KeptResults, make_parser

KEPT = Path(".cache/paper")
BATCHED = (Arm.ONE_STEP, Arm.STREAM, Arm.PARTIAL)
OWN = "predictive"  # this project's planner
LONG = {Arm.PARTIAL: 16, Arm.ASYNC: 24}  # iterations on fleets where one is short against the longest response
LESS = 4  # times, that a fleet is shrunk to see the error
Measured = Callable[[Cell], CellFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What the paper leaves open, e.g. `Placement(tp=0, share=0.25, mfu=0.4)`: `tp` is a place in the table."""

    tp: int
    share: float
    mfu: float


@dataclass(frozen=True, slots=True)
class Band:
    """A figure under all placements, e.g. `Band(1.8, 2.6)`."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> Self:
        """Make the band around the figures of the placements."""
        return cls(min(values), max(values))

    @property
    def centre(self) -> float:
        """Geometric middle."""
        return sqrt(self.low * self.high)

    @property
    def width(self) -> float:
        """The most over the least; both are above 0."""
        return self.high / self.low

    def holds(self, value: float) -> bool:
        """True where that lies in it."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g}, {self.width:.2f} wide"


class Comparison:
    """Figures over fleets, by placement; `quick` keeps one of either."""

    def __init__(self, parameters: Parameters, measured: Measured, *, quick: bool) -> None:
        self._parameters = parameters
        self._measured = measured
        shares, fleets, repack = parameters.learner_share, parameters.fleets, parameters.repack_fleets
        middle = sorted(shares)[len(shares) // 2]
        self._shares = [middle] if quick else [middle, *(share for share in shares if share != middle)]
        sizes = list(fleets)[:1] if quick else list(fleets)
        self._fleets = [(size, gpus) for size in sizes for gpus in (fleets[size][:1] if quick else fleets[size])]
        self._repack_fleets = [(size, repack[size]) for size in sizes]
        self._tps = range(1 if quick else 2)
        self._mfus = parameters.learner_mfu[:1] if quick else parameters.learner_mfu

    def rows(self) -> Iterator[Row]:
        """The table, the middle of the band first."""
        placements = self._placements(self._mfus[0])
        yield from self._ratios(placements, (Arm.SYNC, *BATCHED))
        yield from self._repack(placements)
        yield from self._staleness(placements)
        for mfu in self._mfus[1:]:
            yield from self._ratios(self._middle(mfu)[-1:], [Arm.SYNC])

    def _placements(self, mfu: float) -> list[Placement]:
        """The middle split under each tensor parallelism, then the other splits under the lower one."""
        return [*self._middle(mfu), *(Placement(tp=0, share=share, mfu=mfu) for share in self._shares[1:])]

    def _middle(self, mfu: float) -> list[Placement]:
        return [Placement(tp=tp, share=self._shares[0], mfu=mfu) for tp in self._tps]

    def _cell(self, arm: Arm, fleet: tuple[str, int], at: Placement, planner: str = "none") -> Cell:
        size, gpus = fleet
        tp = self._parameters.tensor_parallel[size][at.tp]
        share = 0.5 if arm is Arm.SYNC else at.share  # which `sync` has no use for
        long = LONG.get(arm) if gpus > self._parameters.fleets[size][0] else None
        return Cell(
            arm=arm, size=size, gpus=gpus, tp=tp, share=share, mfu=at.mfu, planner=planner, iterations=long
        )

    def _speed(self, arm: Arm, fleet: tuple[str, int], at: Placement, planner: str = "none") -> float:
        return self._measured(self._cell(arm, fleet, at, planner)).trained_tokens_per_s

    # ---- schedules

    def _ratios(self, placements: Sequence[Placement], arms: Sequence[Arm]) -> Iterator[Row]:
        published, planner = self._parameters.published, self._parameters.planner
        mfu = placements[0].mfu
        setting, suffix = f"learner at MFU {mfu:g}", "" if mfu == self._mfus[0] else f"_mfu{mfu:g}"
        for arm in arms:
            found = {at: [self._over(arm, fleet, at, planner) for fleet in self._fleets] for at in placements}
            means = [fmean(ratios) for ratios in found.values()]
            yield self._row(f"over_{arm}_mean{suffix}", means, published[f"over_{arm}_mean"], setting)
            yield from self._each(f"over_{arm}{suffix}", found, setting)
            if arm is Arm.SYNC:
                most = [max(ratios) for ratios in found.values()]
                yield self._row(f"over_sync_max{suffix}", most, published["over_sync_max"], setting)
        middle = [at for at in placements if at.share == self._shares[0]]
        yield self._generation_share(middle, setting, suffix)

    def _over(self, arm: Arm, fleet: tuple[str, int], at: Placement, planner: str) -> float:
        return self._speed(Arm.ASYNC, fleet, at, planner) / self._speed(arm, fleet, at)

    def _each(self, name: str, found: dict[Placement, list[float]], setting: str) -> Iterator[Row]:
        """The same fleet by fleet."""
        for place, (size, gpus) in enumerate(self._fleets):
            ratios = [ratios[place] for ratios in found.values()]
            yield self._row(f"{name}_{size}_{gpus}", ratios, None, setting)

    def _generation_share(self, placements: Sequence[Placement], setting: str, suffix: str) -> Row:
        """What generation and the refresh are of a step of `sync`."""
        found = [
            fmean(1 - self._measured(self._cell(Arm.SYNC, fleet, at)).learner_busy_share for fleet in self._fleets)
            for at in placements
        ]
        published = self._parameters.published["generation_share"]
        return self._row(f"sync_generation_share{suffix}", found, published, setting)

    # ---- repack and staleness

    def _repack(self, placements: Sequence[Placement]) -> Iterator[Row]:
        published, parameters = self._parameters.published, self._parameters
        setting = "generation alone, replicas that always have prompts"
        cells = {
            planner: [
                [
                    self._measured(replace(self._cell(Arm.ASYNC, fleet, at, planner), generates_alone=True))
                    for fleet in self._repack_fleets
                ]
                for at in placements
                if planner != OWN or at.share == self._shares[0]
            ]
            for planner in ("none", parameters.planner, OWN)
        }
        off, on, own = cells["none"], cells[parameters.planner], cells[OWN]
        yield self._row("repack_gain", _gains(on, off), published["repack_gain"], setting)
        yield self._row("kv_use_off", _kv(off), published["kv_use_off"], setting)
        yield self._row("kv_use_repack", _kv(on), published["kv_use_repack"], setting)
        for place, (size, gpus) in enumerate(self._repack_fleets):
            one_on, one_off = [[[found[place]] for found in side] for side in (on, off)]
            yield self._row(f"repack_gain_{size}_{gpus}", _gains(one_on, one_off), None, setting)
            yield self._row(f"kv_use_off_{size}_{gpus}", _kv(one_off), None, setting)
        yield self._row("own_planner_gain", _gains(own, off[: len(own)]), None, f"{setting}, middle split")
        yield self._row("own_planner_kv_use", _kv(own), None, f"{setting}, middle split")

    def _staleness(self, placements: Sequence[Placement]) -> Iterator[Row]:
        fleet, planner = self._fleets[0], self._parameters.planner
        cells = [self._measured(self._cell(Arm.ASYNC, fleet, at, planner)) for at in placements]
        setting = f"{fleet[0]} on {fleet[1]} GPUs, at a response's end"
        yield self._row("staleness_below_3", [cell.usual_share for cell in cells], None, setting)
        most = [float(cell.staleness_max) for cell in cells]
        yield self._row("staleness_max", most, self._parameters.published["staleness_max"], setting)

    def _row(self, name: str, values: Sequence[float], paper: float | None, setting: str) -> Row:
        band = Band.around(values)
        words = [f"band {band}"]
        if paper is not None:
            words.append(f"paper {paper:g}, {'inside' if band.holds(paper) else 'outside'}")
        return Row(name, band.centre, "", "; ".join([*words, setting]))


def _gains(on: Sequence[Sequence[CellFigures]], off: Sequence[Sequence[CellFigures]]) -> list[float]:
    """Generated tokens over those without repacking, the mean over fleets, by placement."""
    return [
        fmean(a.generated_tokens_per_s / b.generated_tokens_per_s for a, b in zip(*pair, strict=True))
        for pair in zip(on, off, strict=True)
    ]


def _kv(cells: Sequence[Sequence[CellFigures]]) -> list[float]:
    """Use of the KV cache, the mean over fleets, by placement."""
    return [fmean(cell.kv_use for cell in of_placement) for of_placement in cells]


def shrinking(measured: Measured, parameters: Parameters) -> Iterator[Row]:
    """Errors of a shrunk fleet, on the larger ones of two sizes: a cell over the same one, shrunk less."""
    for size in ("7b", "72b"):
        for arm, planner in ((Arm.SYNC, "none"), (Arm.ASYNC, parameters.planner)):
            small = Cell(
                arm=arm,
                size=size,
                gpus=parameters.fleets[size][-1],
                tp=parameters.tensor_parallel[size][0],
                share=0.5 if arm is Arm.SYNC else sorted(parameters.learner_share)[1],
                mfu=parameters.learner_mfu[0],
                planner=planner,
                iterations=LONG.get(arm),
            )
            large = replace(small, shrink=LESS)
            ratio = measured(small).trained_tokens_per_s / measured(large).trained_tokens_per_s
            yield Row(f"shrunk_{arm}_{size}", ratio, "x", f"trained tokens/s of {small.name} over {large.name}")


def main() -> None:
    """Measure the missing cells and report."""
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one fleet, one split")
    args = parser.parse_args()
    parameters = read_parameters()
    own = [HERE / name for name in ("baselines.py", "cells.py", "parameters.yaml")]
    sources = [*own, BASE, *sorted(BASE.parent.glob("h100_*.yaml"))]
    kept = KeptResults(KEPT, sources=sources, settings="")

    def measured(cell: Cell) -> CellFigures:
        return kept.get(cell.name, CellFigures, lambda: measure(cell))

    rows = list(Comparison(parameters, measured, quick=args.quick).rows())
    if not args.quick:
        rows += shrinking(measured, parameters)
    show("paper", rows, as_json=args.json)


if __name__ == "__main__":
    main()
