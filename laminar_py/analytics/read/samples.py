"""Files that the controller writes beside the ledger: a row a second of the replicas, a row a step of the learner.

Read while a run goes on, or after it was killed: a line that is not whole counts for nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.ledger.row_files import read_rows
from laminar_py.records.metrics import FleetRow, StepRow


class _Summary(msgspec.Struct, frozen=True):
    rl_seconds: float = 0.0  # an evaluation of its own has none


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows of these files, in the order of time."""

    steps: tuple[StepRow, ...]  # without those that were undone
    fleet: tuple[FleetRow, ...]
    rl_s: float  # seconds of RL so far: the most that any file says


def read_samples(folder: Path) -> Samples:
    """Everything beside the ledger of a run; there is a summary once the run has ended."""
    fleet = tuple(read_rows(folder / "fleet.jsonl", FleetRow))
    done = list(read_rows(folder / "metrics.jsonl", StepRow))
    ended_s = _rl_seconds(folder / "summary.json")
    rl_s = max([*(row.rl_s for row in fleet), *(row.rl_s for row in done), ended_s])
    return Samples(tuple(_standing(done)), fleet, rl_s)


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
