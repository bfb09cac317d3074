"""The one reader of a run's record: one state of the ledger and of the files beside it, as a `Snapshot`.

The report, the end of a run and the dashboard call it, also while the run goes on; a reading never holds up the
writer. In the files beside the ledger an unfinished line counts for nothing. Times are seconds since the first
trajectory was issued, on the run's clock: within an incarnation none goes back."""

import json
import math
import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.config.loading import load_config
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import ledger_path, reading
from laminar_py.ledger.evaluations import in_order
from laminar_py.ledger.row_files import read_rows
from laminar_py.ledger.rows import decode_event
from laminar_py.observe.trajectories import (
    Ints,
    RunTimes,
    Stays,
    Times,
    Trajectories,
    read_stays,
    read_trajectories,
)
from laminar_py.records.codec import BoolArray
from laminar_py.records.evaluations import pass_number
from laminar_py.records.events import (
    AnyEvent,
    Evaluated,
    PartStarted,
    ReplicaLeft,
    RolledBack,
    RunEnded,
    RunStarted,
    Scaled,
    Stepped,
    StepSkipped,
)
from laminar_py.records.metrics import FleetRow, StepRow
from laminar_py.records.trajectory import Kind

_REPLICA = re.compile(r"replica-(\d+)")


@dataclass(frozen=True, slots=True)
class Happened:
    """An event, `at_s` seconds after the first trajectory of the run was issued, e.g. -3.2 for a part's start."""

    at_s: float
    event: AnyEvent


@dataclass(frozen=True, slots=True)
class Presence:
    """Times [P] in which replicas were there, on the clock of `History`; none of one replica overlap."""

    replica: Ints
    start_s: Times
    end_s: Times

    @property
    def replicas(self) -> list[int]:
        """Numbers of all that ever were there, ascending."""
        return sorted(set(self.replica.tolist()))


def find_presence(happened: Iterable[Happened], *, replicas: int) -> Presence:
    """Presence by the events of a run; `replicas` are those of its config, for a record without such events."""
    there: dict[int, float] = {}
    spans: list[tuple[int, float, float]] = []
    begins = False  # an incarnation does, whose first fleet is there at once

    def leave(replica: int, at_s: float) -> None:
        spans.append((replica, there.pop(replica), at_s))

    known = False
    for one in happened:
        event = one.event
        if isinstance(event, RunStarted):
            begins = True
            for replica in list(there):
                leave(replica, one.at_s)
        elif isinstance(event, Scaled):
            there |= dict.fromkeys(event.replicas, one.at_s) if begins else {}
            begins, known = False, True
        elif isinstance(event, PartStarted) and known and (match := _REPLICA.fullmatch(event.part)):
            there.setdefault(int(match[1]), one.at_s)
        elif isinstance(event, ReplicaLeft) and event.replica in there:
            leave(event.replica, one.at_s)
    spans += [(replica, start_s, math.inf) for replica, start_s in there.items()]
    if not known:
        spans = [(replica, -math.inf, math.inf) for replica in range(replicas)]
    of, start, end = zip(*spans, strict=True) if spans else ((), (), ())
    return Presence(np.array(of, np.int32), np.array(start, np.float64), np.array(end, np.float64))


def with_last_fleet(config: RunConfig, happened: Iterable[Happened]) -> RunConfig:
    """The config with as many replicas as the run was to have last, which remedies start from."""
    fleets = [one.event for one in happened if isinstance(one.event, Scaled)]
    if not fleets or len(fleets[-1].replicas) == config.rollout.replicas:
        return config
    rollout = config.rollout.model_copy(update={"replicas": len(fleets[-1].replicas)})
    return config.model_copy(update={"rollout": rollout})


@dataclass(frozen=True, slots=True)
class FleetSizes:
    """Number of replicas by seconds of RL, as rows of `fleet.jsonl` have it: `replicas[i]` from `at_s[i]` on."""

    at_s: tuple[float, ...] = ()
    replicas: tuple[int, ...] = ()

    def replica_seconds(self, rl_s: float) -> float:
        """Seconds of all replicas until then; the first number holds from the start of RL on."""
        edges = [0.0, *self.at_s[1:], math.inf]
        spans = zip(edges, edges[1:], self.replicas, strict=False)
        return sum(max(0.0, min(rl_s, end) - start) * count for start, end, count in spans)


NOT_KNOWN = FleetSizes()


def fleet_sizes(rows: Iterable[FleetRow]) -> FleetSizes:
    """Sizes by these rows, which are read once and not kept."""
    changes: list[tuple[float, int]] = []
    for row in rows:
        if not changes or len(row.running) != changes[-1][1]:
            changes.append((row.rl_s, len(row.running)))
    return FleetSizes(tuple(at_s for at_s, _ in changes), tuple(count for _, count in changes))


_OF_ONE_TRAJECTORY = [
    kind.__struct_config__.tag for kind in get_args(AnyEvent) if "trajectory_id" in kind.__struct_fields__
]
EventKind = TypeVar("EventKind")


@dataclass(frozen=True)
class History:
    """Events of parts, in the order of the log."""

    happened: tuple[Happened, ...]
    starts_s: Times  # when each incarnation began

    def of(self, kind: type[EventKind]) -> Iterator[tuple[float, EventKind]]:
        """Events of one kind, with their times."""
        return ((one.at_s, one.event) for one in self.happened if isinstance(one.event, kind))

    @cached_property
    def steps(self) -> tuple[tuple[float, Stepped], ...]:
        """Learner steps that count, with the times at which they ended: none that was undone."""
        kept: list[tuple[float, Stepped]] = []
        for one in self.happened:
            if isinstance(one.event, Stepped):
                kept.append((one.at_s, one.event))
            elif isinstance(one.event, RolledBack):
                last = one.event.step
                kept = [(at_s, step) for at_s, step in kept if step.step <= last]
        return tuple(kept)

    @cached_property
    def skipped(self) -> tuple[int, ...]:
        """Steps whose loss or gradient was not finite, the last time that they were done."""
        found: set[int] = set()
        for one in self.happened:
            if isinstance(one.event, Stepped):
                found.discard(one.event.step)  # its own word that it was skipped follows
            elif isinstance(one.event, StepSkipped):
                found.add(one.event.step)
        return tuple(sorted(found))

    @property
    def undone_tokens(self) -> int:
        """Tokens of steps that were rolled back."""
        done, kept = (step.num_tokens for _, step in self.of(Stepped)), (step.num_tokens for _, step in self.steps)
        return sum(done) - sum(kept)

    @property
    def evaluations(self) -> list[Evaluated]:
        """Evaluations of all sets in the order of seconds of RL."""
        return in_order(event for _, event in self.of(Evaluated))

    @property
    def of_sets(self) -> dict[str, list[Evaluated]]:
        """Evaluations of each set, in the order of seconds of RL; the first set is that of the config."""
        sets: dict[str, list[Evaluated]] = {}
        for one in sorted(self.evaluations, key=lambda one: pass_number(one.pass_id)):
            sets.setdefault(one.set_name, [])
        for one in self.evaluations:
            sets[one.set_name].append(one)
        return sets

    @property
    def live(self) -> bool:
        """True until the run has ended by its own word, so also after it was killed."""
        last = [one.event for one in self.happened if isinstance(one.event, RunStarted | RunEnded)]
        return bool(last) and isinstance(last[-1], RunStarted)


def read_history(connection: sqlite3.Connection, times: RunTimes) -> History:
    """Events of a whole run; costs one look at each row of the log."""
    left_out = ", ".join(f"'{kind}'" for kind in _OF_ONE_TRAJECTORY)
    rows = connection.execute(
        f"SELECT seq, mono, body FROM event WHERE kind NOT IN ({left_out}) ORDER BY seq"
    ).fetchall()
    seq, mono, bodies = zip(*rows, strict=True) if rows else ((), (), ())
    at = times.at(seq, mono).tolist() if rows else []
    events = tuple(Happened(at_s, decode_event(body)) for at_s, body in zip(at, bodies, strict=True))
    return History(events, times.starts_s)


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


DroppedRow = tuple[str, str, str, int, float | None, int | None, float]  # id, reason, detail, length, reward, ...


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at a moment; times in seconds since its first trajectory was issued."""

    run: Path  # folder or ledger, as it was named
    name: str
    config: RunConfig | None  # None: the folder holds none
    seq: int  # of the last event
    end_s: float  # when that was
    heard_s: float  # when that event was, in seconds since 1970: long ago if the run was killed
    everyone: Trajectories  # of training and of evaluations
    stays: Stays  # of everyone; what is open ends at `end_s`
    history: History
    recomputed: int  # tokens whose KV cache was computed again after a move or new weights
    samples: Samples

    @cached_property
    def trajectories(self) -> Trajectories:
        """Trajectories of training."""
        return self.everyone.where(~self.is_eval)

    @cached_property
    def is_eval(self) -> BoolArray:
        """[N] True for evaluations among everyone."""
        return self.everyone.is_kind(Kind.EVAL)

    def places(self, stays: Stays) -> npt.NDArray[np.int64]:
        """[M] of the trajectories of these stays, among everyone."""
        found: npt.NDArray[np.int64] = np.searchsorted(self.everyone.number, stays.trajectory)
        return found

    def ids(self, numbers: Ints) -> list[str]:
        """Ids of trajectories with these ascending numbers, from the ledger."""
        return [id for (id,) in self._select("id", numbers, order="ASC")]

    def dropped(self, numbers: Ints) -> list[DroppedRow]:
        """Rows of dropped trajectories with these numbers, from the ledger, the newest first."""
        at_s = f"ended_s - {self.everyone.origin_s!r}"
        columns = f"id, drop_reason, coalesce(drop_detail, ''), length, reward, replica, {at_s}"
        return self._select(columns, numbers, order="DESC")

    def _select(self, columns: str, numbers: Ints, *, order: str) -> list[Any]:
        chosen = "number IN (SELECT value FROM json_each(?))"
        query = f"SELECT {columns} FROM trajectory WHERE {chosen} ORDER BY number {order}"
        with reading(self.run) as connection:
            return connection.execute(query, (json.dumps(numbers.tolist()),)).fetchall()

    def at_rl(self, rl_s: Times) -> Times:
        """Times of moments that are known by seconds of RL, which pause for evaluations; by the steps between."""
        ends = {step.step: at_s for at_s, step in self.history.steps}
        known = [(row.rl_s, ends[row.step]) for row in self.samples.steps if row.step in ends]
        if not known:
            return rl_s
        of_rl, of_run = np.maximum.accumulate(np.array(known).T, axis=1)
        before, after = of_run[0] - of_rl[0], of_run[-1] - of_rl[-1]
        inside = np.interp(rl_s, of_rl, of_run)
        found: Times = np.where(rl_s < of_rl[0], rl_s + before, np.where(rl_s > of_rl[-1], rl_s + after, inside))
        return found


def read_snapshot(run: Path) -> Snapshot:
    """Everything. Raises a one-line `ConfigError` if there is no readable ledger, or a config that is wrong."""
    folder = ledger_path(run).parent
    with reading(run) as connection:
        return _read(run, folder, connection)


def _read(run: Path, folder: Path, connection: sqlite3.Connection) -> Snapshot:
    path = folder / "config.yaml"
    config = load_config(path, []) if path.is_file() else None
    has_environment = config is not None and config.has_environment
    everyone = read_trajectories(connection, has_environment=has_environment)
    if not len(everyone):  # times count from the start then
        begun = connection.execute("SELECT coalesce(min(wall), 0) FROM event WHERE seq = 1").fetchone()[0]
        everyone = replace(everyone, origin_s=begun)
    times = RunTimes(connection, everyone.origin_s)
    history = read_history(connection, times)
    heard = "SELECT head.seq, coalesce(wall, 0.0) FROM head LEFT JOIN event USING (seq)"
    seq, heard_s = connection.execute(heard).fetchone()
    known = [everyone.ended_s, everyone.finished_s, everyone.started_s, everyone.issued_s]
    latest = [float(np.nanmax(column)) for column in known if np.any(~np.isnan(column))]
    end_s = max([0.0, *latest, *(one.at_s for one in history.happened[-1:])])
    return Snapshot(
        run=run,
        name=folder.resolve().name,
        config=None if config is None else with_last_fleet(config, history.happened),
        seq=seq,
        end_s=end_s,
        heard_s=heard_s,
        everyone=everyone,
        stays=read_stays(connection, times).until(end_s).with_environments(everyone),
        history=history,
        recomputed=_read_recomputed(connection),
        samples=read_samples(folder),
    )


def _read_recomputed(connection: sqlite3.Connection) -> int:
    """Tokens of prompt and response that replicas computed again when they took up a begun training trajectory."""
    length = "json_extract(body, '$.length')"
    (tokens,) = connection.execute(
        f"SELECT coalesce(sum({length} + length(ids) / 4), 0) FROM event"
        " CROSS JOIN trajectory ON trajectory.id = subject CROSS JOIN prompt ON prompt.id = prompt_id"
        f" WHERE event.kind = 'assigned' AND {length} > 0 AND trajectory.kind = ?",
        (Kind.TRAIN,),
    ).fetchone()
    return int(tokens)
