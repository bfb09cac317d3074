"""Predicted beside measured, for a setting of a run. Common to what `laminar bench plan` measures."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from laminar_lab.bench.report import Row
from laminar_lab.bench.runs import FinishedRun
from laminar_lab.bench.turns import spread
from laminar_lab.simulate.figures import WARM_SHARE


@dataclass(frozen=True, slots=True)
class Setting:
    """Overrides of a config under a name, e.g. `Setting("sync", ("schedule=sync",))`.

    `simulated` replaces, in the simulation, what only a real run has.
    """

    name: str
    settings: tuple[str, ...]
    simulated: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a setting, a value for each round, e.g. `Compared("sync", [8100, 8200], [7900, 8000])`."""

    name: str
    predicted: Sequence[float]
    measured: Sequence[float]

    @property
    def error(self) -> float:
        """Median predicted over median measured, less 1."""
        return median(self.predicted) / median(self.measured) - 1

    @property
    def difference(self) -> float:
        """Median predicted less median measured."""
        return median(self.predicted) - median(self.measured)

    @property
    def spread(self) -> float:
        """Range of the measured over their median."""
        return (max(self.measured) - min(self.measured)) / median(self.measured)

    def row(self, name: str, *, conditions: str) -> Row:
        """Predicted over measured."""
        told = f"x trained tokens/s; predicted {spread(self.predicted)}, measured {spread(self.measured)}"
        return Row(name, 1 + self.error, told, conditions)


def median_error(compared: Sequence[Compared]) -> float:
    """Median size of the errors of all settings."""
    return median(abs(one.error) for one in compared)


def warm_steps(num_steps: int) -> int:
    """First steps of a run that do not count, simulated or not."""
    return max(1, round(WARM_SHARE * num_steps))


def trained_tokens_per_s(done: FinishedRun) -> float:
    """Rate of a real run, in its seconds, of the steps that count in a simulated one too."""
    first, last = done.steps[warm_steps(len(done.steps)) - 1], done.steps[-1]
    return (last.trained_tokens - first.trained_tokens) / (last.rl_s - first.rl_s)
