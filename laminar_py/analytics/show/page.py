"""`report.html`: one file without network, made of a report. Owns how the page is put together.

Called by `laminar report` and, with fresh data again and again, by the dashboard. Everything that comes from the
run reaches the page as JSON and is shown as text, so nothing in it can become markup or script; a content security
policy, which names the page's own scripts by digest, holds the browser to that.
"""

import base64
import hashlib
from importlib.resources import files
from pathlib import Path

import msgspec

from laminar_py.analytics.show import figures
from laminar_py.analytics.show.panels import Page
from laminar_py.analytics.show.timeline import make_timeline
from laminar_py.analytics.show.walls import wall_panel
from laminar_py.analytics.triage.report import RunReport
from laminar_py.config.loading import dump_config
from laminar_py.ledger.database import ledger_path

REPORT_NAME = "report.html"


def write_page(report: RunReport) -> Path:
    """Draw the run into its folder, and say where. Raises a one-line `ConfigError` without a ledger."""
    return write_beside(report, REPORT_NAME, render(make_page(report)).encode())


def write_beside(report: RunReport, name: str, content: bytes) -> Path:
    """Write a file into the folder of the run, whole or not at all, and say where."""
    path = ledger_path(report.snapshot.run).parent / name
    partial = path.with_suffix(".tmp")
    partial.write_bytes(content)
    partial.replace(path)
    return path


def make_page(report: RunReport) -> Page:
    """Everything that the page shows; ids are read from the ledger."""
    snapshot, train = report.snapshot, report.snapshot.trajectories
    drop_kinds, drop_rows = figures.drops(snapshot)
    stages, step_s = figures.step_bars(report)
    return Page(
        name=snapshot.name,
        seq=snapshot.seq,
        live=snapshot.history.live,
        heard_s=snapshot.heard_s,
        headline=figures.headline(report),
        wall=None if report.diagnosis is None else wall_panel(report.diagnosis),
        timeline=make_timeline(snapshot),
        distributions=figures.histograms(train),
        staleness=figures.staleness_map(train),
        curves=figures.curves(snapshot),
        learner=figures.learner_curves(snapshot),
        hops=figures.relay_hops(snapshot.history),
        stages=stages,
        step_s=step_s,
        drops=drop_kinds,
        drop_rows=drop_rows,
        config="" if snapshot.config is None else dump_config(snapshot.config),
    )


def encode_page(page: Page) -> bytes:
    """Page as JSON; numbers that are not finite become null."""
    return msgspec.json.encode(page)


def render(page: Page | None) -> str:
    """HTML of the whole page. Without data it asks `data.json` beside it, again and again."""
    from plotly.offline import get_plotlyjs  # heavy, and needed here alone

    web = files("laminar_py.analytics.show") / "web"
    data = "null" if page is None else encode_page(page).decode()
    contents = {
        "style": (web / "page.css").read_text("utf-8"),
        "plotly": get_plotlyjs(),
        "scripts": "\n".join((web / name).read_text("utf-8") for name in ("panels.js", "timeline.js", "page.js")),
        "data": data.replace("<", "\\u003c"),  # no end of script within strings
    }
    contents["policy"] = _policy(contents["plotly"], contents["scripts"])
    html = (web / "page.html").read_text("utf-8")
    before, *rest = html.split("{{")
    pieces = [before]
    for piece in rest:
        name, _, after = piece.partition("}}")
        pieces += [contents[name], after]
    return "".join(pieces)


def _policy(*scripts: str) -> str:
    """Content security policy: these scripts run and no other, and the page asks its own server alone."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:;"
        " font-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
