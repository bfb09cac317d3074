"""Files that the controller writes beside the ledger: a row a second of the replicas, a row a step of the learner.

Read while a run goes on, or after it was killed: a line that is not whole counts for nothing.
"""

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

    steps: tuple[StepRow, ...]  # one for each, as last done
    fleet: tuple[FleetRow, ...]
    rl_s: float  # seconds of RL so far: the most that any file says


def read_samples(folder: Path) -> Samples:
    """Everything beside the ledger of a run; there is a summary once the run has ended."""
    fleet = tuple(read_rows(folder / "fleet.jsonl", FleetRow))
    done = list(read_rows(folder / "metrics.jsonl", StepRow))
    steps = {row.step: row for row in done}
    ended_s = _rl_seconds(folder / "summary.json")
    rl_s = max([*(row.rl_s for row in fleet), *(row.rl_s for row in done), ended_s])
    return Samples(tuple(steps[step] for step in sorted(steps)), fleet, rl_s)


def _rl_seconds(summary: Path) -> float:
    """Seconds of RL of a run that has ended; 0 before. Raises `ConfigError` for a file of another form."""
    if not summary.is_file():
        return 0.0
    try:
        return msgspec.json.decode(summary.read_bytes(), type=_Summary).rl_seconds
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{summary}: {error}; delete it, and the figures are those of the last step") from error
