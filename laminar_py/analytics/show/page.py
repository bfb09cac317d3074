"""`report.html`: one file without network, made of a run's record. Owns how the page is put together.

Called by `laminar report` and, with fresh data again and again, by the dashboard. Everything that comes from the
run reaches the page as JSON and is shown as text, so nothing in it can become markup or script.
"""

from importlib.resources import files
from pathlib import Path

import msgspec

from laminar_py.analytics.show import figures
from laminar_py.analytics.show.panels import Page, WallPanel
from laminar_py.analytics.show.snapshot import Snapshot, read_snapshot
from laminar_py.analytics.show.timeline import read_timeline
from laminar_py.ledger.database import ledger_path, reading

REPORT_NAME = "report.html"


def write_report(run: Path, *, wall: WallPanel | None = None, snapshot: Snapshot | None = None) -> Path:
    """Draw the run into its folder, and say where: as it is now, or as `snapshot` has it.

    Raises a one-line `ValueError` without a ledger.
    """
    page = read_page(run, snapshot or read_snapshot(run), wall=wall)
    path = ledger_path(run).parent / REPORT_NAME
    partial = path.with_suffix(".tmp")
    partial.write_text(render(page), encoding="utf-8")
    partial.replace(path)
    return path


def read_page(run: Path, snapshot: Snapshot, *, wall: WallPanel | None = None) -> Page:
    """All that the page shows. `wall` is what limits the run, where that is known."""
    train = snapshot.trajectories
    with reading(run) as connection:
        timeline = read_timeline(connection, snapshot)
        drop_kinds, drop_rows = figures.drops(connection, train)
    stages, step_s = figures.step_stages(snapshot)
    if wall is not None and wall.stages:
        stages, step_s = list(wall.stages), wall.step_s
    return Page(
        name=snapshot.name,
        seq=snapshot.seq,
        live=snapshot.live,
        heard_s=snapshot.heard_s,
        headline=figures.headline(snapshot, wall),
        wall=wall,
        timeline=timeline,
        distributions=figures.distributions(train),
        staleness=figures.staleness_map(train),
        curves=figures.curves(snapshot),
        hops=figures.hops(snapshot),
        stages=stages,
        step_s=step_s,
        drops=drop_kinds,
        drop_rows=drop_rows,
    )


def encode_page(page: Page) -> bytes:
    """As JSON; numbers that are not finite become null."""
    return msgspec.json.encode(page)


def render(page: Page | None) -> str:
    """The whole page. Without data it asks `data.json` beside it, again and again."""
    from plotly.offline import get_plotlyjs  # heavy, and needed here alone

    web = files("laminar_py.analytics.show") / "web"
    data = "null" if page is None else encode_page(page).decode()
    parts = {
        "style": (web / "page.css").read_text("utf-8"),
        "plotly": get_plotlyjs(),
        "scripts": "\n".join((web / name).read_text("utf-8") for name in ("panels.js", "timeline.js", "page.js")),
        "data": data.replace("<", "\\u003c"),  # no end of script within strings
    }
    html = (web / "page.html").read_text("utf-8")
    before, *rest = html.split("{{")
    pieces = [before]
    for piece in rest:
        name, _, after = piece.partition("}}")
        pieces += [parts[name], after]
    return "".join(pieces)
