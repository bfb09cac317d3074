"""`report.html`: one file without network, made of a report. Owns which panels there are and what is in them.

Called by `laminar report` and, with fresh data again and again, by the dashboard.
"""

from importlib.resources import files
from pathlib import Path

import msgspec

from laminar_py.config.loading import dump_config
from laminar_py.ledger.database import ledger_path
from laminar_py.observe.analytics.show import figures
from laminar_py.observe.analytics.show.html import fill
from laminar_py.observe.analytics.show.panels import EmbeddedTexts, Page
from laminar_py.observe.analytics.show.texts import embed_texts, make_texts
from laminar_py.observe.analytics.show.timeline import make_timeline
from laminar_py.observe.analytics.show.walls import wall_panel
from laminar_py.observe.analytics.triage.report import RunReport

REPORT_NAME = "report.html"


def write_page(report: RunReport) -> Path:
    """Draw the run into its folder, and say where. Raises a one-line `ConfigError` without a ledger."""
    page = make_page(report, texts=embed_texts(report.snapshot.run))
    return write_beside(report, REPORT_NAME, render(page).encode())


def write_beside(report: RunReport, name: str, content: bytes) -> Path:
    """Write a file into the folder of the run, whole or not at all, and say where."""
    path = ledger_path(report.snapshot.run).parent / name
    partial = path.with_suffix(".tmp")
    partial.write_bytes(content)
    partial.replace(path)
    return path


def make_page(report: RunReport, *, texts: EmbeddedTexts | None = None) -> Page:
    """Everything that the page shows; ids are read from the ledger. Without texts it asks its server for them."""
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
        texts=make_texts(snapshot.run, total=len(snapshot.everyone), here=texts),
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
    web = files("laminar_py.observe.analytics.show") / "web"
    scripts = ("panels.js", "timeline.js", "tokens.js", "texts.js", "page.js")
    return fill(
        (web / "page.html").read_text("utf-8"),
        style="\n".join((web / name).read_text("utf-8") for name in ("page.css", "texts.css")),
        scripts="\n".join((web / name).read_text("utf-8") for name in scripts),
        data=b"null" if page is None else encode_page(page),
    )
