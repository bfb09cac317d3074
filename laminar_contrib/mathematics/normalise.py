"""Plain LaTeX of an answer, whatever characters and layout it was written with.

Pure; `tokens` reads the result. Invariant: no two digits come together that a reader would see apart: "3 3" stays
"3 3", while `10\\,000` and "10 000" are numbers written in groups of three.
"""

import re
import unicodedata
from fractions import Fraction

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
SIGNS = {
    "−": "-",
    "–": "-",
    "—": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∙": r"\cdot ",
    "∗": "*",
    "÷": "/",
    "π": r"\pi ",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3] ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "⩽": r"\le ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∖": r"\setminus ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "…": r"\ldots ",
    "′": "'",
    "’": "'",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
}
GREEK = {
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "δ": "delta",
    "ε": "epsilon",
    "θ": "theta",
    "λ": "lambda",
    "μ": "mu",
    "ρ": "rho",
    "σ": "sigma",
    "τ": "tau",
    "φ": "phi",
    "ω": "omega",
}
UNICODE = str.maketrans(SIGNS | {letter: rf"\{name} " for letter, name in GREEK.items()})
GROUPING = re.compile(r"(?<=\d)(?:\\[,;:! ]|~|\{,\}|,\\!)\s*(?=\d{3}(?!\d))")
SPACED_GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?: \d{3})+(?!\d| ?[/\\])")
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")  # 0.1\overline{6}
BETWEEN_DOTS = re.compile(r"(\d*)\.(\d*)\\dot\s*\{(\d)\}(\d*)\\dot\s*\{(\d)\}")
TAIL = re.compile(r"(?<!\d)(\d*)\.(\d*?)(\d{1,6}?)\3{2,}\s*(?:\\[lc]?dots|\.\.\.)")
SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\d.])")
DELIMITERS = re.compile(r"(?<!\\)\$|(?<!\\)\\[()\[\]]")
NO_FENCE = re.compile(r"\\(?:left|right)\s*\.")
BARE_FIELD = re.compile(r"\\mathbb\s*([A-Z])\b|\\([RZNQC])(?![A-Za-z])")
PLAIN_UNION = re.compile(r"(?<=[)\]}])\s*U\s*(?=\\?[(\[{])")
ROW_SPACING = re.compile(r"(?<=\\\\)\[[^\]]*\]")
OPEN_LEFT = re.compile(r"(^|\\cup|\\in|=)\s*\]([^\[\]]+,[^\[\]]+)([\[\]])")  # "]1, 2[", as the French write
OPEN_RIGHT = re.compile(r"(^|\\cup|\\in|=)\s*\[([^\[\]]+,[^\[\]]+)\[")
DOTS_OF_DECIMAL = re.compile(r"(\d\.\d+)\s*(?:\\[lc]?dots|\.\.\.)")
UNITS_OF_SPEED = re.compile(r"(?<=[\d}])\s*\b((?:m|km|ft|mi|cm)/(?:s|h|hr|min)(?:\^\{?2\}?)?)$")
UNIT_FRACTION = re.compile(r"\\frac\{\\(?:text|mathrm)\{([^{}]*)\}\}\{\\(?:text|mathrm)\{([^{}]*)\}(\^\{?2\}?)?\}")
STARTS, ENDS = " \n\t*`,;:", " \n\t*`.,;:。"


def normalise(text: str) -> str:
    """Normal form of an answer, e.g. `$x = 10\\,000.$` becomes `x = 10000`."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda found: f"^{{{found[0].translate(SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda found: f"_{{{found[0].translate(SUBSCRIPTS)}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(UNICODE))
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z{}%$(\[])", r"\\", text)  # escaped twice, as in JSON
    text = BARE_FIELD.sub(lambda found: rf"\mathbb{{{found[1] or found[2]}}}", NO_FENCE.sub("", text))
    text = PLAIN_UNION.sub(r" \\cup ", text)
    text = UNIT_FRACTION.sub(r"\\text{\1/\2}\3", text)
    text = DELIMITERS.sub(" ", ROW_SPACING.sub("", text))
    text = GROUPING.sub("", text).replace("{,}", ".").replace(r",\!", ",")
    text = SPACED_GROUPS.sub(lambda found: found[0].replace(" ", ""), text)
    text = BETWEEN_DOTS.sub(lambda found: _fraction(found[1], found[2], found[3] + found[4] + found[5]), text)
    text = TAIL.sub(lambda found: _fraction(found[1], found[2], found[3]), text)
    text = REPEATING.sub(lambda found: _fraction(found[1], found[2], found[3]), text)
    text = DOTS_OF_DECIMAL.sub(r"\1", text).replace("...", r"\ldots ")
    text = OPEN_LEFT.sub(lambda found: f"{found[1]}({found[2]}{')' if found[3] == '[' else ']'}", text)
    text = OPEN_RIGHT.sub(r"\1[\2)", text)
    text = SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    return UNITS_OF_SPEED.sub(r" \\text{\1}", _strip(text))


def _fraction(whole: str, first: str, period: str) -> str:
    """Exact value of a repeating decimal, e.g. 0.1666... of "0", "1" and "6"."""
    scale = 10 ** len(first)
    value = Fraction(int(whole + first or "0"), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return rf"{{\frac{{{value.numerator}}}{{{value.denominator}}}}}"


def _strip(text: str) -> str:
    text = text.lstrip(STARTS).rstrip(ENDS)
    while text.endswith("\\") and not text.endswith(r"\\"):  # of "\ " at the end
        text = text[:-1].rstrip(ENDS)
    return text
