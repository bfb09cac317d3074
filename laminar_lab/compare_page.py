"""The page of `laminar compare --html`: curves over seconds, tokens and device-hours, with bands over seeds.

The page is one file without network, made of the same parts as the report's page.
"""

from collections.abc import Sequence

from laminar_lab.compare import ComparedRun, Comparison, change_lines, group_names, seed_curves, short_names
from laminar_lab.report.kit import Chart, Panel, Series
from laminar_lab.report.page import Page, render_page
from laminar_lab.verdicts import AXES, Axis, Pair, Seeds, band

COLOURS = ("accent", "second", "third", "ink", "quiet", "alarm")
POINTS = 121  # of a band
BANDS = (
    "A line is the mean over seeds, a band the 95 % t-interval of that mean; dots are evaluations of single seeds."
    " Between two evaluations a curve is straight."
)


def render_comparison(runs: Sequence[ComparedRun], comparison: Comparison) -> str:
    """Return the HTML of a comparison."""
    names = group_names(runs, comparison)
    sets = list(dict.fromkeys(name for run in runs for name in run.by_set))
    curves = {name: [run.by_set.get(name, []) for run in runs] for name in sets}
    curves["reward in training"] = [run.reward for run in runs]
    panels = [_verdict_panel(pair, names, comparison.measure) for pair in comparison.pairs]
    for place, (name, points) in enumerate(curves.items()):
        seeds = [seed_curves(runs, group, points) for group in comparison.groups]
        charts = [_chart(axis, names, seeds, dots=name in sets) for axis in AXES]
        panels.append(Panel(id=f"curves-{place}", title=name, note=BANDS, charts=charts, is_wide=True))
    changed = change_lines(runs, short_names([run.report for run in runs]))
    page = Page(
        name=f"Compared: {', '.join(names)}",
        seq=0,
        live=False,
        heard_s=0.0,
        note="; ".join(["means and bands over seeds", *map(str, changed)]),
        cards=[],
        panels=panels,
    )
    return render_page(page)


def _verdict_panel(pair: Pair, names: Sequence[str], measure: str) -> Panel:
    title, *lines = pair.lines(names, measure)
    return Panel(id=f"pair-{pair.first}-{pair.second}", title=title, lines=lines, is_wide=True)


def _chart(axis: Axis, names: Sequence[str], groups: Sequence[Seeds], *, dots: bool) -> Chart:
    """Return the curves of all groups along one axis; `dots` adds the points of single seeds."""
    series: list[Series] = []
    for place, (name, seeds) in enumerate(zip(names, groups, strict=True)):
        colour, drawn = COLOURS[place % len(COLOURS)], band(seeds, axis, points=POINTS)
        if not drawn.x:
            continue
        if len(seeds) > 1:
            x, y = [*drawn.x, *drawn.x[::-1]], [*drawn.high, *drawn.low[::-1]]
            series.append(Series(name=name, kind="band", colour=colour, x=x, y=y))
        series.append(Series(name=name, colour=colour, x=drawn.x, y=drawn.mean))
        if dots:
            points = [point for curve in seeds.values() for point in curve.points]
            x, y = [axis.cost(point) for point in points], [point.value for point in points]
            series.append(Series(name=name, kind="dots", colour=colour, x=x, y=y))
    return Chart(name=axis.name, x=axis.name, y="", series=series, is_empty=not series)
