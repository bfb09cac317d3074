"""HTML in one file without network: a template with its style, plotly, scripts and data in it. Called by pages.

Everything that comes from runs reaches a page as JSON and is shown as text, so nothing in it can become markup or
script; a content security policy, which names the page's own scripts by digest, holds the browser to that.
"""

import base64
import hashlib


def fill(template: str, *, style: str, scripts: str, data: bytes) -> str:
    """HTML with `{{style}}`, `{{plotly}}`, `{{scripts}}`, `{{data}}` (JSON) and `{{policy}}` put in."""
    from plotly.offline import get_plotlyjs  # heavy, and needed here alone

    contents = {
        "style": style,
        "plotly": get_plotlyjs(),
        "scripts": scripts,
        "data": data.decode().replace("<", "\\u003c"),  # no end of script within strings
    }
    contents["policy"] = _policy(contents["plotly"], contents["scripts"])
    before, *rest = template.split("{{")
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
