"""Units of an answer and how they compare: "50 cm" is "0.5 m" and not "50 m".

Pure. Invariant: only units of the tables below ever tell two answers apart; any other word after a number, such as
"marbles", says nothing that the number does not.
"""

from dataclasses import dataclass
from fractions import Fraction

from laminar_contrib.mathematics.words import word_set

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
    """Product of powers of known units: km/s is `MeasureUnit(Fraction(1000), (("length", 1), ("time", -1)))`."""

    size: Fraction
    dimensions: tuple[tuple[str, int], ...]


def look_up(word: str) -> tuple[str, Fraction] | None:
    """Dimension and size of a unit, also in the plural; None of a word that is no known unit."""
    word = word.rstrip(".")
    if word in SYMBOLS:
        return SYMBOLS[word]
    lowered = word.lower()
    endings = ("", "s", "es") if len(word) > 2 else ("",)
    names = [lowered.removesuffix(ending) for ending in endings]
    return next((NAMES[name] for name in names if name in NAMES), None) or SYMBOLS.get(lowered)


def make_unit(factors: list[tuple[str, int]]) -> MeasureUnit | None:
    """Unit of words with their powers, e.g. of `[("km", 1), ("h", -1)]`; None where one of them is not known."""
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
    """Factors in which "square", "mph" and the like are worked out."""
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
