"""Where the gain of a held-out set comes from, if its reward is a sum of terms: from the task, or from a bonus.

The end of a run, the report and its page call it. The main term is the first verdict (`math`, `code`, ...), or
the first term where none is a verdict.
"""

from laminar_py.config.run import RunConfig
from laminar_py.records.evaluations import SetFigures
from laminar_py.records.scoring import short_terms

MOST = 0.5  # share of a gain from other terms above which it is not the task's


def main_term(figures: SetFigures) -> str | None:
    """Return the name of the main term; None where the reward has only one."""
    if len(figures.terms) < 2:
        return None
    return next((name for name in figures.terms if name in figures.verdicts), next(iter(figures.terms)))


def describe_main_term(first: SetFigures, last: SetFigures) -> str:
    """Return the change of the main term, e.g. "score 0.340 -> 0.355"; "" where the reward has only one term."""
    main = main_term(last)
    return "" if main is None or main not in first.terms else _describe_change(main, first, last)


def warn_of_bonus(first: SetFigures, last: SetFigures, config: RunConfig | None) -> str:
    """Return words if most of the gain in reward is from other terms than the main one; else "".

    A term counts with its weight in `config`, and a value that a function gives by name as it is.
    """
    main, gain = main_term(last), last.mean.value - first.mean.value
    if main is None or main not in first.terms or gain <= 0:
        return ""
    terms = () if config is None else config.reward.terms
    weights = {term.title: term.weight for term in terms}
    own = weights.get(main, 1.0) * _change(main, first, last)
    if own >= (1 - MOST) * gain:
        return ""
    others = [name for name in last.terms if name != main and name in first.terms]
    other = max(others, key=lambda name: weights.get(name, 1.0) * _change(name, first, last), default=None)
    if other is None or _change(other, first, last) * weights.get(other, 1.0) <= 0:
        return ""
    changes = f"{_describe_change(other, first, last)}, {_describe_change(main, first, last)}"
    return f"most of the gain of {gain:.3f} is not from {_short(last)[main]}: {changes}"


def _change(name: str, first: SetFigures, last: SetFigures) -> float:
    return last.terms[name].mean.value - first.terms[name].mean.value


def _short(figures: SetFigures) -> dict[str, str]:
    """Return the short name of each term."""
    return {name: short for short, name in short_terms({name: name for name in figures.terms}).items()}


def _describe_change(name: str, first: SetFigures, last: SetFigures) -> str:
    values = f"{first.terms[name].mean.value:.3f} -> {last.terms[name].mean.value:.3f}"
    return f"{_short(last)[name]} {values}"
