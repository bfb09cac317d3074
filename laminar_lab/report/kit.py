"""The page kit: parts of a page, and HTML in one file without network.

`web/kit.js` draws the parts. Text of runs reaches a page as JSON and is shown as text, so it cannot become markup
or script. A content security policy names the page's own scripts by digest, and the browser runs no other script.
The maker of a page bounds its parts.
"""

import base64
import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec


class Card(msgspec.Struct, frozen=True):
    """A number of the headline, e.g. `Card("goodput", "8,102 tokens/s", "trained, per second of RL")`."""

    name: str
    value: str
    note: str = ""


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Points [N] of a chart, e.g. `Series(name="reward", x=[1.0, 2.0], y=[0.2, 0.4])`; NaN is a gap."""

    name: str
    x: list[float]
    y: list[float] | list[str]
    # line, points, bar; row: a horizontal bar, `x` long, from `base` on; dots: small; band: a filled outline
    kind: str = "line"
    colour: str = "accent"  # of the style: accent, second, third, quiet, alarm, ink
    base: list[float] | None = None  # [N]
    width: list[float] | None = None  # [N] of bars
    low: list[float] | None = None  # [N] bounds of an interval
    high: list[float] | None = None
    words: list[str] | None = None  # [N] under the pointer, instead of the numbers


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """Grid [rows][columns] of numbers, drawn as colours; NaN has no colour."""

    name: str  # of the numbers
    x: list[float]  # [columns]
    y: list[str] | list[int]  # [rows]
    z: list[list[float]] | list[list[int]]


class Chart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Series on one pair of axes; an empty chart shows "Nothing yet"."""

    name: str = ""  # above it, and in the choice of a panel
    x: str  # titles of the axes
    y: str
    series: list[Series] = []
    heat: Heat | None = None
    marks: list[tuple[str, float]] = []  # vertical lines with texts, e.g. ("p50 12.4 s", 12.4)
    log: bool = False  # a logarithmic axis x, in seconds
    from_zero: bool = False  # an axis y that begins at 0
    is_empty: bool = False


class Table(msgspec.Struct, frozen=True):
    """Table of texts; the first column is words, the others numbers."""

    head: list[str]
    rows: list[list[str]]


class Panel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Section of a page, from top to bottom: lead, note, lines, charts and tables, text."""

    id: str  # of its element
    title: str
    note: str = ""
    lead: str = ""
    lines: list[str] = []
    charts: list[Chart] = []
    tables: list[Table] = []
    choose: str = ""  # name of a choice among the charts; "": show all
    text: str = ""  # in a box that a click opens
    is_wide: bool = False  # else it shares its row with the next panel


def render(data: bytes, web: Traversable) -> str:
    """Return the HTML of a page: the template with `data` (JSON), and `main.html`, CSS and scripts of `web`."""
    from plotly.offline import get_plotlyjs  # heavy

    kit, own = files("laminar_lab.report") / "web", sorted(web.iterdir(), key=lambda file: file.name)

    def joined(suffix: str) -> str:
        others = [file for file in own if file.name.endswith(suffix) and file.name != f"kit{suffix}"]
        return "\n".join(file.read_text("utf-8") for file in (kit / f"kit{suffix}", *others))

    contents = {
        "style": joined(".css"),
        "main": (web / "main.html").read_text("utf-8"),
        "plotly": get_plotlyjs(),
        "scripts": joined(".js"),
        "data": data.decode().replace("<", "\\u003c"),  # so that no string ends the script
    }
    contents["policy"] = _policy(contents["plotly"], contents["scripts"])
    before, *rest = (kit / "kit.html").read_text("utf-8").split("{{")
    pieces = [before]
    for piece in rest:
        name, _, after = piece.partition("}}")
        pieces += [contents[name], after]
    return "".join(pieces)


def _policy(*scripts: str) -> str:
    """Return a content security policy: only these scripts run, and the page contacts only its own server."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:;"
        " font-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
