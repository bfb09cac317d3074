"""Scores counted as they come, for `laminar reward try` and `laminar rescore`: nothing of a response is kept."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from laminar_py.records.scoring import Score

COUNTED = 10  # rewards that differ: more are told by mean, least, median and most


@dataclass(slots=True)
class Numbers:
    """Values and seconds of one term, or of the reward; seconds of equal responses are left out."""

    values: "array[float]" = field(default_factory=lambda: array("d"))
    seconds: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, value: float, elapsed_s: float) -> None:
        """Take a value in, and its seconds where it was computed and not known already."""
        self.values.append(value)
        if elapsed_s > 0:
            self.seconds.append(elapsed_s)

    @property
    def p50_p95_ms(self) -> tuple[str, str]:
        """Milliseconds, e.g. `("1.2", "8.0")`; "-" where none was computed."""
        if not self.seconds:
            return "-", "-"
        p50, p95 = np.percentile(self.seconds, [50, 95])
        return f"{1e3 * p50:.1f}", f"{1e3 * p95:.1f}"


class ScoreTally:
    """Counts of scores; `table` and `terms` are made of all that were added."""

    def __init__(self) -> None:
        self.rewards = Numbers()
        self.num_failed = 0
        self._terms = defaultdict[str, Numbers](Numbers)

    @property
    def num_scored(self) -> int:
        """Responses with a value."""
        return len(self.rewards.values)

    def add(self, score: Score) -> None:
        """Count a score."""
        if score.value is None:
            self.num_failed += 1
            return
        self.rewards.add(score.value, score.elapsed_s)
        for term in score.terms:
            self._terms[term.name].add(term.value, term.elapsed_s)

    def tables(self) -> Iterator[Table]:
        """How often each reward was given, or its spread, and the terms, as far as there are any."""
        values = self.rewards.values
        counts = Counter(f"{value:g}" for value in values)
        if values and len(counts) <= COUNTED:
            yield _table(("reward", "responses"), [(value, str(count)) for value, count in counts.most_common()])
        elif values:
            spread = (np.mean(values), min(values), np.median(values), max(values))
            yield _table(("reward: mean", "min", "p50", "max"), [tuple(f"{number:g}" for number in spread)])
        if self._terms:
            rows: list[tuple[str, ...]] = [
                (name, f"{np.mean(term.values):g}", *term.p50_p95_ms) for name, term in sorted(self._terms.items())
            ]
            yield _table(("term", "mean", "p50 ms", "p95 ms"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(*head)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    return table
