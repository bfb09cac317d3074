"""What the controller writes beside the ledger: one line a second of the replicas, one a step of the learner.

Read while a run goes on, or after it was killed: a last line that is not whole yet counts for nothing, and neither
does one that a crash tore, even if a resumed run wrote the next one behind it.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.analytics.read.columns import Ints, Times

log = logging.getLogger(__name__)
Line = TypeVar("Line")

_LONGEST_S = 5.0  # a sample speaks for no longer: the controller was down


class FleetLine(msgspec.Struct, frozen=True):
    """What is used of a line of `fleet.jsonl`."""

    rl_s: float
    running: list[int]  # [replicas]
    kv_use: list[float]  # [replicas] share of the KV cache
    waiting: list[int] = []  # [replicas] in their engines


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of a line of `metrics.jsonl`; the counts of tokens and `rl_s` are totals of the run so far."""

    step: int
    rl_s: float
    reward: float = 0.0
    entropy: float = 0.0  # nats
    generated_tokens: int = 0
    trained_tokens: int = 0


class _Summary(msgspec.Struct, frozen=True):
    rl_seconds: float


@dataclass(frozen=True, slots=True)
class FleetSamples:
    """[S] samples of R replicas."""

    seconds: Times  # [S] that each speaks for
    running: Ints  # [S, R]
    kv_use: Times  # [S, R]


def read_fleet(run: Path) -> FleetSamples:
    """The samples with as many replicas as the last one has."""
    lines = list(read_lines(run / "fleet.jsonl", FleetLine))
    replicas = len(lines[-1].running) if lines else 0
    lines = [line for line in lines if len(line.running) == replicas]
    at = np.array([line.rl_s for line in lines], np.float64)
    seconds = np.clip(np.diff(at, prepend=0.0), 0.0, _LONGEST_S)
    shape = (len(lines), replicas)
    return FleetSamples(
        seconds,
        np.array([line.running for line in lines], np.int32).reshape(shape),
        np.array([line.kv_use for line in lines], np.float64).reshape(shape),
    )


def read_steps(run: Path) -> list[StepLine]:
    """One for each step, as last done: those that a rollback undid are left out."""
    steps: dict[int, StepLine] = {}
    for line in read_lines(run / "metrics.jsonl", StepLine):
        steps[line.step] = line
    return [steps[step] for step in sorted(steps)]


def read_rl_seconds(run: Path) -> float:
    """Seconds of RL so far: the most that any file says. There is a summary once the run has ended."""
    fleet = [line.rl_s for line in read_lines(run / "fleet.jsonl", FleetLine)]
    steps = [line.rl_s for line in read_lines(run / "metrics.jsonl", StepLine)]
    summary = run / "summary.json"
    ended = [msgspec.json.decode(summary.read_bytes(), type=_Summary).rl_seconds] if summary.is_file() else []
    return max([*fleet, *steps, *ended], default=0.0)


def running_mean(values: Times, width: int) -> npt.NDArray[np.float64]:
    """Of each value and the `width` - 1 before it."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    end = np.arange(1, len(total))
    start = np.maximum(end - width, 0)
    return (total[end] - total[start]) / (end - start)


def read_lines(path: Path, kind: type[Line]) -> Iterator[Line]:
    """All whole lines of such a file; none without one.

    Raises `ValueError` with file and line for one that is whole and of another form.
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
                raise ValueError(f"{path}: line {place}: {error}; use the release that wrote it") from error
            except msgspec.DecodeError:
                log.info("%s: line %d is torn and left out", path, place)
