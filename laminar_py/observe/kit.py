"""The page kit: the parts that a page is made of, and HTML in one file without network. Called by pages.

`web/kit.js` draws the parts. Everything that comes from runs reaches a page as JSON and is shown as text, so
nothing in it can become markup or script; a content security policy, which names the page's own scripts by
digest, holds the browser to that. The maker of a page bounds its parts, however long the run.
"""

import base64
import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec


class Card(msgspec.Struct, frozen=True):
    """Number of the headline, e.g. `Card("goodput", "8,102 tokens/s", "trained, per second of RL")`."""

    name: str
    value: str
    note: str = ""


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Points [N] of a chart, e.g. `Series(name="reward", x=[1.0, 2.0], y=[0.2, 0.4])`; NaN is a gap."""

    name: str
    x: list[float]
    y: list[float] | list[str]
    kind: str = "line"  # line, points, bar; row: a horizontal bar, `x` long, from `base` on
    colour: str = "accent"  # of the style: accent, second, third, quiet, alarm, ink
    colours: list[str] | None = None  # [N] of single bars
    symbol: str = ""  # of points, in plotly's words
    base: list[float] | None = None  # [N]
    width: list[float] | None = None  # [N] of bars
    low: list[float] | None = None  # [N] bounds of an interval
    high: list[float] | None = None
    words: list[str] | None = None  # [N] under the pointer, in place of the numbers


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """Grid [rows][columns] of numbers that colours show; NaN has none."""

    name: str  # of the numbers
    x: list[float]  # [columns]
    y: list[str] | list[int]  # [rows]
    z: list[list[float]] | list[list[int]]


class Chart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Series on one pair of axes. An empty chart says so."""

    name: str = ""  # over it, and where one of several is chosen
    x: str  # titles of the axes
    y: str
    series: list[Series] = []
    heat: Heat | None = None
    marks: list[tuple[str, float]] = []  # vertical lines with names
    log: bool = False  # the axis x, which has seconds then
    from_zero: bool = False  # the axis y
    is_empty: bool = False


class Table(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Table of texts; columns from the second on are numbers, but for the last `words`."""

    name: str = ""
    note: str = ""
    head: list[str]
    rows: list[list[str]]
    words: int = 0
    opens_texts: bool = False  # the first column has ids of trajectories whose text a click opens
    has_filter: bool = False  # a field filters its rows


class Panel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Section of a page, from top to bottom: note, lead, lists, charts and tables, text."""

    id: str  # of its element
    title: str
    note: str = ""
    lead: str = ""
    lists: list[list[str]] = []
    charts: list[Chart] = []
    tables: list[Table] = []
    choose: str = ""  # name of a choice that shows one of the charts, or tables, at a time; "": all are shown
    text: str = ""  # in a box that opens
    is_wide: bool = False  # else it shares its line with the next


def render(data: bytes, web: Traversable) -> str:
    """HTML of a page: the kit's template with `data` (JSON), and with `main.html`, `*.css`, `*.js` of `web`."""
    from plotly.offline import get_plotlyjs  # heavy, and needed here alone

    kit, own = files("laminar_py.observe") / "web", sorted(web.iterdir(), key=lambda file: file.name)

    def joined(suffix: str) -> str:
        others = [file for file in own if file.name.endswith(suffix) and file.name != f"kit{suffix}"]
        return "\n".join(file.read_text("utf-8") for file in (kit / f"kit{suffix}", *others))

    contents = {
        "style": joined(".css"),
        "main": (web / "main.html").read_text("utf-8"),
        "plotly": get_plotlyjs(),
        "scripts": joined(".js"),
        "data": data.decode().replace("<", "\\u003c"),  # no end of script within strings
    }
    contents["policy"] = _policy(contents["plotly"], contents["scripts"])
    before, *rest = (kit / "kit.html").read_text("utf-8").split("{{")
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
