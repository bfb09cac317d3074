"""Words and units of answers, and the normal form of their text. Pure.

The vocabulary is data: commands of LaTeX by their meaning, and words that change an answer. Units of the tables
tell two answers apart ("50 cm" is "0.5 m" and not "50 m"); any other word after a number, such as "marbles", says
nothing. `normalise` makes plain LaTeX of an answer with any layout. It never joins two digits that a
reader sees apart: "3 3" stays "3 3", while `10\\,000` and "10 000" are numbers written in groups of three.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction


def word_set(text: str) -> frozenset[str]:
    """Return the set of words in a text."""
    return frozenset(text.split())


LAYOUT = word_set(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle displaystyle textstyle"
    " scriptstyle limits nolimits quad qquad enspace thinspace hfill noindent allowbreak rm bf it boxed fbox"
    " underline ensuremath mathstrut therefore"
) | frozenset(",;:!> ~&\n\t")
TEXTS = word_set("text textbf textit textrm textnormal textsf texttt mbox hbox emph")
FONTS = word_set("mathrm mathbf mathit mathsf mathcal mathtt boldsymbol bm operatorname pmb")
DROPPED = word_set("hspace vspace phantom hphantom vphantom color textcolor label tag")  # with their argument
ACCENTS = word_set("vec hat bar overline widehat tilde overrightarrow dot ddot")
FUNCTIONS = word_set(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan ln log lg exp max min gcd lcm"
)
GREEK = word_set(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi"
    " psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell vartheta"
)
SYNONYMS = {
    "row": "cr",
    "frac": "dfrac tfrac cfrac",
    "binom": "dbinom tbinom",
    "le": "leq leqslant leqq",
    "ge": "geq geqslant geqq",
    "ne": "neq",
    "*": "times cdot ast cdotp",
    "/": "div",
    "{": "lbrace",
    "}": "rbrace",
    "[": "lbrack",
    "]": "rbrack",
    "|": "lvert rvert vert mid",
    "<": "lt",
    ">": "gt",
    "'": "prime",
    ":": "colon",
    "emptyset": "varnothing",
    "infty": "infin infinity inf",
    "circ": "degree",
    "dots": "ldots cdots dotsc",
    "approx": "approxeq simeq",
    "setminus": "backslash smallsetminus",
    "phi": "varphi",
    "epsilon": "varepsilon",
    "and": "land wedge",
    "or": "lor vee",
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
}
MEANS = {variant: name for name, variants in SYNONYMS.items() for variant in variants.split()}
PLAIN = {"**": "^", "<=": "le", ">=": "ge", "!=": "ne", "==": "=", "∕": "/", "⁄": "/"}
SPELLED = {"pi": "pi", "infty": "infty", "infinity": "infty", "inf": "infty", "sqrt": "sqrt", "theta": "theta"}
UNITS_AND_TEENS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    " seventeen eighteen nineteen twenty"
)
NUMBERS = dict(zip(UNITS_AND_TEENS.split(), range(21), strict=True))
MULTIPLES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
NO_UNITS = word_set(
    "not no none never neither nor negative minus plus squared cubed half halves third thirds quarter quarters"
    " dozen score mod modulo base more less fewer most least greater than approximately about around between to"
    " from factorial if when for where while unless except infinite infinity undefined does do exist is are was"
    " be it the at out but only maybe either other with without up down root cannot can impossible each all any"
    " fifth fifths sixth sixths seventh eighth eighths ninth tenth tenths hundredth hundredths thousandth"
    " thousandths below above under over past"
)  # words that say something else than a unit
SHORT_WORDS = word_set("yes no odd all any not the is are at of as to if by per day row")
MONTHS = word_set("january february march april may june july august september october november december")
NEGATIONS = word_set("not no never nor neither cannot isn doesn")
ALL_NUMBERS = {"all real numbers", "all reals", "all real number", "real numbers", "all real values"}
NO_ANSWER = {"no solution", "no solutions", "no real solutions", "no real solution", "none", "empty set"}


PREFIXES = {
    "p": Fraction(1, 10**12),
    "n": Fraction(1, 10**9),
    "μ": Fraction(1, 10**6),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "c": Fraction(1, 100),
    "d": Fraction(1, 10),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
}
PREFIX_NAMES = {
    "pico": "p",
    "nano": "n",
    "micro": "μ",
    "milli": "m",
    "centi": "c",
    "deci": "d",
    "kilo": "k",
    "mega": "M",
    "giga": "G",
    "tera": "T",
}
METRIC = {  # symbol: dimension, and names
    "m": ("length", "meter metre"),
    "g": ("mass", "gram"),
    "s": ("time", "second"),
    "L": ("volume", "liter litre"),
    "l": ("volume", ""),
    "A": ("current", "ampere amp"),
    "V": ("voltage", "volt"),
    "W": ("power", "watt"),
    "J": ("energy", "joule"),
    "N": ("force", "newton"),
    "Pa": ("pressure", "pascal"),
    "Hz": ("frequency", "hertz"),
    "Ω": ("resistance", "ohm"),
    "mol": ("amount", "mole"),
    "K": ("temperature", "kelvin"),
    "T": ("field", "tesla"),
    "eV": ("electron energy", ""),
    "B": ("data", "byte"),
    "cal": ("heat", "calorie"),
}
OTHERS = {  # dimension: each unit's size, and its names
    "length": (
        ("0.0254", "in inch inches"),
        ("0.3048", "ft foot feet"),
        ("0.9144", "yd yard"),
        ("1609.344", "mi mile"),
    ),
    "time": (("1", "sec"), ("60", "min minute"), ("3600", "h hr hour"), ("86400", "day"), ("604800", "week")),
    "long time": (("1", "month"), ("12", "yr year"), ("120", "decade"), ("1200", "century centuries")),
    "mass": (("453.59237", "lb pound"), ("28.349523125", "oz ounce"), ("1000000", "tonne"), ("907184.74", "ton")),
    "volume": (
        ("3.785411784", "gal gallon"),
        ("0.946352946", "quart"),
        ("0.473176473", "pint"),
        ("0.2365", "cup"),
    ),
    "area of land": (("1", "acre"), ("2.4710538", "hectare ha")),
    "data": (("0.125", "bit"),),
    "money": (("1", "$ dollar usd buck"), ("0.01", "cent penny pennies ¢")),
    "euros": (("1", "€ euro eur"),),
    "sterling": (("1", "£ gbp"),),
    "rupees": (("1", "₹ rupee rs"),),
    "yen": (("1", "¥ yen"),),
    "yuan": (("1", "yuan rmb cny"),),
    "angle": (("1", "degree deg"),),
    "radians": (("1", "rad radian"),),
    "celsius": (("1", "celsius"),),
    "fahrenheit": (("1", "fahrenheit"),),
    "speed at sea": (("1", "knot"),),
    "morning": (("1", "am"),),
    "afternoon": (("1", "pm"),),
}
NAMES = {
    **{name: (dimension, Fraction(1)) for dimension, names in METRIC.values() for name in names.split()},
    **{
        prefix + name: (dimension, PREFIXES[symbol])
        for prefix, symbol in PREFIX_NAMES.items()
        for dimension, names in METRIC.values()
        for name in names.split()
    },
    **{
        name: (dimension, Fraction(size))
        for dimension, rows in OTHERS.items()
        for size, names in rows
        for name in names.split()
    },
}
"""Dimension and size of a unit by its name, in lower case."""
SYMBOLS = {
    **{symbol: (dimension, Fraction(1)) for symbol, (dimension, _) in METRIC.items()},
    **{
        prefix + symbol: (dimension, size)
        for prefix, size in PREFIXES.items()
        for symbol, (dimension, _) in METRIC.items()
    },
}
"""The same by its symbol, in which a letter's case counts."""
SHORTHANDS = {"mph": ("mile", "hour"), "kmh": ("km", "hour"), "kph": ("km", "hour")}
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
SHORT = word_set("sq cm mm km kg ft hr min sec lb oz ml hz day usd gal rad deg mph")
"""Units that may follow a number as plain letters."""


@dataclass(frozen=True, slots=True)
class MeasureUnit:
    """A unit as a product, with its size in base units.

    km/s is `MeasureUnit(Fraction(1000), (("length", 1), ("time", -1)))`.
    """

    size: Fraction
    dimensions: tuple[tuple[str, int], ...]


def look_up(word: str) -> tuple[str, Fraction] | None:
    """Return dimension and size of a unit, also in the plural; None for an unknown word."""
    word = word.rstrip(".")
    if word in SYMBOLS:
        return SYMBOLS[word]
    lowered = word.lower()
    endings = ("", "s", "es") if len(word) > 2 else ("",)
    names = [lowered.removesuffix(ending) for ending in endings]
    return next((NAMES[name] for name in names if name in NAMES), None) or SYMBOLS.get(lowered)


def is_unit(text: str) -> bool:
    """Return True for a unit such as "km/h" that is no other word of the language."""
    is_other_word = text.lower() in ("in", "a", "am", "as", "at", "h", "t", "score")
    return not is_other_word and all(map(look_up, text.split("/")))


def make_unit(factors: list[tuple[str, int]]) -> MeasureUnit | None:
    """Make a unit of words with their powers, e.g. `[("km", 1), ("h", -1)]`; None if a word is unknown."""
    size, dimensions = Fraction(1), dict[str, int]()
    for word, power in _spelled_out(factors):
        found = look_up(word)
        if found is None or abs(power) > 9:
            return None
        dimension, one = found
        size *= one**power
        dimensions[dimension] = dimensions.get(dimension, 0) + power
    kept = tuple(sorted((name, power) for name, power in dimensions.items() if power))
    return MeasureUnit(size, kept) if kept else None


def _spelled_out(factors: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Write out "square", "mph" and the like as factors."""
    spelled: list[tuple[str, int]] = []
    waiting = 1
    if any(word.lower() in ("celsius", "fahrenheit") for word, _ in factors):
        factors = [(word, power) for word, power in factors if not word.lower().startswith("degree")]
    for word, power in factors:
        lowered = word.lower().rstrip(".")
        if lowered in POWERS:
            waiting = POWERS[lowered]
        elif lowered in SHORTHANDS:
            over, under = SHORTHANDS[lowered]
            spelled += [(over, power), (under, -power)]
        else:
            spelled.append((word, power * waiting))
            waiting = 1
    return spelled


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
GREEK_LETTERS = {
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
UNICODE = str.maketrans(SIGNS | {letter: rf"\{name} " for letter, name in GREEK_LETTERS.items()})
GROUP_MARK = r"(?:,\\!|\{,\}|\\[,;:! ]\s*|~|,)"
DIGIT_RUN = re.compile(rf"(?<![\d.,}}])\d+(?:{GROUP_MARK}\d+)+")
THOUSANDS = re.compile(rf"[1-9]\d{{0,2}}(?:{GROUP_MARK}\d{{3}})+")
BRACKET = re.compile(r"\\?[()\[\]]|\\[{}]")
SPACED_GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?: \d{3})+(?!\d| ?[/\\])")
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")  # 0.1\overline{6}
BETWEEN_DOTS = re.compile(r"(\d*)\.(\d*)\\dot\s*\{(\d)\}(\d*)\\dot\s*\{(\d)\}")
TAIL = re.compile(r"(?<!\d)(\d*)\.(\d*?)(?:(\d{1,6}?)\3{2,}|(\d{3,6}?)\4)\s*(?:\\[lc]?dots|\.\.\.)")
SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\d.])")
DELIMITERS = re.compile(r"(?<!\\)\$|(?<!\\)\\[()\[\]]")
NO_FENCE = re.compile(r"\\(?:left|right)\s*\.")
BARE_FIELD = re.compile(r"\\mathbb\s*([A-Z])\b|\\([RZNQC])(?![A-Za-z])")
PLAIN_UNION = re.compile(r"(?<=[)\]}])\s*U\s*(?=\\?[(\[{])")
ROW_SPACING = re.compile(r"(?<=\\\\)\[[^\]]*\]")
OPEN_LEFT = re.compile(r"(^|\\cup|\\in|=)\s*\]([^\[\]]+,[^\[\]]+)([\[\]])")  # "]1, 2[", as the French write
OPEN_RIGHT = re.compile(r"(^|\\cup|\\in|=)\s*\[([^\[\]]+,[^\[\]]+)\[")
DOTS_OF_DECIMAL = re.compile(r"(\d\.\d+)\s*(?:\\[lc]?dots|\.\.\.)")
ORDINAL = re.compile(r"(?<=\d)(?:(?:st|nd|rd|th)\b|\^\{?\\text\{(?:st|nd|rd|th)\}\}?)")
TIME_OF_DAY = re.compile(r"(?i)(?<![A-Za-z])([ap])\.\s?m\b\.?")
UNITS_OF_SPEED = re.compile(r"(?<=[\d}])\s*\b((?:m|km|ft|mi|cm)/(?:s|h|hr|min)(?:\^\{?2\}?)?)$")
UNIT_FRACTION = re.compile(r"\\frac\{\\(?:text|mathrm)\{([^{}]*)\}\}\{\\(?:text|mathrm)\{([^{}]*)\}(\^\{?2\}?)?\}")
STARTS, ENDS = " \n\t*`,;:", " \n\t*`.,;:。"


def normalise(text: str) -> str:
    """Return the normal form of an answer, e.g. `$x = 10\\,000.$` becomes `x = 10000`."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda found: f"^{{{found[0].translate(SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda found: f"_{{{found[0].translate(SUBSCRIPTS)}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(UNICODE))
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z{}%$(\[])", r"\\", text)  # escaped twice, as in JSON
    text = BARE_FIELD.sub(lambda found: rf"\mathbb{{{found[1] or found[2]}}}", NO_FENCE.sub("", text))
    text = PLAIN_UNION.sub(r" \\cup ", text)
    text = UNIT_FRACTION.sub(r"\\text{\1/\2}\3", text)
    text = DELIMITERS.sub(" ", ROW_SPACING.sub("", text))
    text = DIGIT_RUN.sub(_without_group_marks, text)
    text = SPACED_GROUPS.sub(lambda found: found[0].replace(" ", ""), text)
    text = BETWEEN_DOTS.sub(lambda found: _fraction(found[1], found[2], found[3] + found[4] + found[5]), text)
    text = TAIL.sub(lambda found: _fraction(found[1], found[2], found[3] or found[4]), text)
    text = REPEATING.sub(lambda found: _fraction(found[1], found[2], found[3]), text)
    text = DOTS_OF_DECIMAL.sub(r"\1", text).replace("...", r"\ldots ")
    text = OPEN_LEFT.sub(lambda found: f"{found[1]}({found[2]}{')' if found[3] == '[' else ']'}", text)
    text = OPEN_RIGHT.sub(r"\1[\2)", text)
    text = SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    text = ORDINAL.sub("", TIME_OF_DAY.sub(r"\1m", text))
    return UNITS_OF_SPEED.sub(r" \\text{\1}", _strip(text))


def _without_group_marks(run: re.Match[str]) -> str:
    """Return digits that are written in groups of three without the marks between them; other runs as they are.

    In brackets a plain comma parts two items: (3,100) is a point.
    """
    if not THOUSANDS.fullmatch(run[0]):
        return run[0]
    brackets = [found[0][-1] for found in BRACKET.finditer(run.string, 0, run.start())]
    depth = sum(bracket in "([{" for bracket in brackets) - sum(bracket in ")]}" for bracket in brackets)
    is_item = depth > 0 and re.search(r"\d,\d", run[0])
    return run[0] if is_item else re.sub(GROUP_MARK, "", run[0])


def _fraction(whole: str, first: str, period: str) -> str:
    """Return the exact value of a repeating decimal: "0", "1" and "6" make 0.1666..."""
    scale = 10 ** len(first)
    value = Fraction(int(whole + first or "0"), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return rf"{{\frac{{{value.numerator}}}{{{value.denominator}}}}}"


def _strip(text: str) -> str:
    text = text.lstrip(STARTS).rstrip(ENDS)
    while text.endswith("\\") and not text.endswith(r"\\"):  # of "\ " at the end
        text = text[:-1].rstrip(ENDS)
    return text
