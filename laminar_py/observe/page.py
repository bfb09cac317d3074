"""`report.html`: one file without network, made of a report. Owns which panels there are and what is in them.

Called by `laminar report` and, with fresh data again and again, by the dashboard.
"""

from importlib.resources import files
from pathlib import Path

import msgspec

from laminar_py.config.loading import dump_config
from laminar_py.observe.figures import FIGURES
from laminar_py.observe.kit import Card, Panel, render
from laminar_py.observe.panels import (
    curves_panel,
    distribution_panels,
    drops_panel,
    learner_panel,
    relay_panel,
    staleness_panel,
    step_panel,
    timeline,
    wall_panel,
)
from laminar_py.observe.report import RunReport
from laminar_py.observe.texts import EmbeddedTexts, TextsPanel, embed_texts, make_texts
from laminar_py.observe.trace import write_beside

REPORT_NAME = "report.html"


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page shows of a run."""

    name: str
    seq: int
    live: bool  # as `History.live`
    heard_s: float  # when the last event was, seconds since 1970
    cards: list[Card]
    panels: list[Panel]  # above the texts
    texts: TextsPanel
    more: list[Panel]  # below them


def write_page(report: RunReport) -> Path:
    """Draw the run into its folder, and say where. Raises a one-line `ConfigError` without a ledger."""
    page = make_page(report, texts=embed_texts(report.snapshot.run))
    return write_beside(report, REPORT_NAME, render_page(page).encode())


def encode_page(page: Page) -> bytes:
    """Page as JSON; numbers that are not finite become null."""
    return msgspec.json.encode(page)


def render_page(page: Page | None) -> str:
    """HTML of the whole page. Without data it asks `data.json` beside it, again and again."""
    return render(b"null" if page is None else encode_page(page), files("laminar_py.observe") / "web")


def make_page(report: RunReport, *, texts: EmbeddedTexts | None = None) -> Page:
    """Everything that the page shows; ids are read from the ledger. Without texts it asks its server for them."""
    snapshot, train = report.snapshot, report.snapshot.trajectories
    lengths, latencies = distribution_panels(train)
    panels = [timeline(snapshot), lengths, latencies, staleness_panel(train), step_panel(report)]
    config = "" if snapshot.config is None else dump_config(snapshot.config)
    settings = [Panel(id="config", title="Config", text=config, is_wide=True)] if config else []
    return Page(
        name=snapshot.name,
        seq=snapshot.seq,
        live=snapshot.history.live,
        heard_s=snapshot.heard_s,
        cards=headline(report),
        panels=[
            *([] if report.diagnosis is None else [wall_panel(report.diagnosis)]),
            *panels,
            curves_panel(snapshot),
            learner_panel(snapshot),
        ],
        texts=make_texts(snapshot.run, total=len(snapshot.everyone), here=texts),
        more=[relay_panel(snapshot.history), drops_panel(snapshot), *settings],
    )


def headline(report: RunReport) -> list[Card]:
    """Figures that a reader wants first; those of the table that have a note, and evaluations."""
    cards = [Card("simulated", "no real run", report.simulation)] if report.simulation else []
    if report.diagnosis is not None:
        wall = str(report.diagnosis.binding.wall)
        cards.append(Card("limited by", wall, "evidence and remedies are below"))
    for figure in FIGURES:
        value = figure.value(report) if figure.note is not None else None
        if figure.note is not None and isinstance(value, int | float):
            cards.append(Card(figure.name, figure.tell(value), figure.note(report)))
    for name, passes in report.snapshot.history.of_sets.items():
        last = passes[-1].figures
        words = f"{passes[0].figures.mean.value:.3f} at the first evaluation; the last: {last.describe()}"
        cards.append(Card(f"{name}: {last.name}", f"{last.mean.value:.3f}", words))
    return cards
