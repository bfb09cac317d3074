"""Files that the controller writes beside the ledger: a row a second of the replicas, a row a step of the learner.

Read while a run goes on, or after it was killed: a line that is not whole counts for nothing.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.ledger.row_files import read_rows
from laminar_py.observe.analytics.read.fleet import NOT_KNOWN, FleetSizes, fleet_sizes
from laminar_py.records.metrics import FleetRow, StepRow


class _Summary(msgspec.Struct, frozen=True):
    rl_seconds: float = 0.0  # an evaluation of its own has none


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows of these files, in the order of time."""

    steps: tuple[StepRow, ...]  # without those that were undone
    fleet: tuple[FleetRow, ...]
    rl_s: float  # seconds of RL so far: the most that any file says


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of RL, and of CPU in them, that the processes of a run on its controller's host took."""

    rl_s: float  # so far: the most that any file says
    core_s: float
    sizes: FleetSizes = NOT_KNOWN


def read_samples(folder: Path) -> Samples:
    """Everything beside the ledger of a run; there is a summary once the run has ended."""
    fleet = tuple(read_rows(folder / "fleet.jsonl", FleetRow))
    return Samples(read_steps(folder), fleet, read_costs(folder).rl_s)


def read_steps(folder: Path) -> tuple[StepRow, ...]:
    """Rows of the steps of a run, without those that were undone."""
    return tuple(_standing(read_rows(folder / "metrics.jsonl", StepRow)))


def read_costs(folder: Path) -> Costs:
    """Costs of a run; its rows, a week of which are half a million, are not kept."""
    done_s = (row.rl_s for row in read_rows(folder / "metrics.jsonl", StepRow))
    rl_s, core_s, before_s = max(_rl_seconds(folder / "summary.json"), *done_s, 0.0), 0.0, math.inf

    def count(rows: Iterable[FleetRow]) -> Iterator[FleetRow]:
        nonlocal rl_s, core_s, before_s
        for row in rows:
            core_s += max(0.0, row.rl_s - before_s) * row.cores * (row.own_cpu_use or 0.0)
            rl_s, before_s = max(rl_s, row.rl_s), row.rl_s
            yield row

    sizes = fleet_sizes(count(read_rows(folder / "fleet.jsonl", FleetRow)))
    return Costs(rl_s, core_s, sizes)


def _standing(done: Iterable[StepRow]) -> list[StepRow]:
    """Steps that stand, of all in the order in which they were done: a run goes back to one before it goes on."""
    steps: list[StepRow] = []
    for row in done:
        while steps and steps[-1].step >= row.step:
            steps.pop()
        steps.append(row)
    return steps


def _rl_seconds(summary: Path) -> float:
    """Seconds of RL of a run that has ended; 0 before. Raises `ConfigError` for a file of another form."""
    if not summary.is_file():
        return 0.0
    try:
        return msgspec.json.decode(summary.read_bytes(), type=_Summary).rl_seconds
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{summary}: {error}; delete it, and the figures are those of the last step") from error
