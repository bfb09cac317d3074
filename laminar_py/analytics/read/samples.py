"""Files that the controller writes beside the ledger: a row a second of the replicas, a row a step of the learner.

Read while a run goes on, or after it was killed: a last line that is not whole yet counts for nothing, and neither
does one that a crash tore, even if a resumed run wrote the next one behind it.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.records.metrics import FleetRow, StepRow

log = logging.getLogger(__name__)
Row = TypeVar("Row")


class _Summary(msgspec.Struct, frozen=True):
    rl_seconds: float


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows of these files, in the order of time."""

    steps: tuple[StepRow, ...]  # one for each, as last done
    fleet: tuple[FleetRow, ...]
    rl_s: float  # seconds of RL so far: the most that any file says


def read_samples(folder: Path) -> Samples:
    """Everything beside the ledger of a run; there is a summary once the run has ended."""
    fleet = tuple(_read_rows(folder / "fleet.jsonl", FleetRow))
    done = list(_read_rows(folder / "metrics.jsonl", StepRow))
    steps = {row.step: row for row in done}
    summary = folder / "summary.json"
    ended = [msgspec.json.decode(summary.read_bytes(), type=_Summary).rl_seconds] if summary.is_file() else []
    rl_s = max([*(row.rl_s for row in fleet), *(row.rl_s for row in done), *ended], default=0.0)
    return Samples(tuple(steps[step] for step in sorted(steps)), fleet, rl_s)


def _read_rows(path: Path, kind: type[Row]) -> Iterator[Row]:
    """Rows of all whole lines; none without a file.

    Raises `ConfigError` with file and line for one that is whole and of another form.
    """
    if not path.is_file():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for place, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                continue
            try:
                yield decoder.decode(line)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{path}: line {place}: {error}; use the release that wrote it") from error
            except msgspec.DecodeError:
                log.info("%s: line %d is torn and left out", path, place)
