"""The reader of a run's record: one state of the ledger and of the row files beside it, as a `Snapshot`.

The report, the end of a run and the dashboard call it, also while a run is running. Reading never delays the
writer. Times are seconds since the first trajectory was issued, on the run's clock, which never goes back within
one controller.
"""

import json
import math
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_lab.report.trajectories import (
    Ints,
    Residences,
    RunTimes,
    Times,
    Trajectories,
    read_residences,
    read_trajectories,
)
from laminar_py.config.loading import load_config
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.ledger import decode_event, in_order, last_settings, ledger_path, read_rows, reading
from laminar_py.observe import Summary
from laminar_py.records.codec import BoolArray
from laminar_py.records.evaluations import pass_number
from laminar_py.records.events import (
    AnyEvent,
    Evaluated,
    Leased,
    PartStarted,
    ReplicaLeft,
    RolledBack,
    RunEnded,
    RunStarted,
    Scaled,
    SettingChanged,
    Stepped,
    StepSkipped,
)
from laminar_py.records.metrics import FleetRow, StepRow
from laminar_py.records.trajectory import Kind

_REPLICA = re.compile(r"replica-(\d+)")


@dataclass(frozen=True, slots=True)
class Happened:
    """An event, `at_s` seconds after the first trajectory was issued, e.g. -3.2 for the start of a process."""

    at_s: float
    event: AnyEvent


@dataclass(frozen=True, slots=True)
class Presence:
    """[P] periods in which replicas belonged to the fleet; periods of one replica do not overlap."""

    replica: Ints
    start_s: Times
    end_s: Times

    @property
    def replicas(self) -> list[int]:
        """Numbers of all replicas that were ever in the fleet, ascending."""
        return sorted(set(self.replica.tolist()))


def find_presence(happened: Iterable[Happened], *, replicas: int) -> Presence:
    """Return the periods from a run's events; a record without such events has `replicas` for all time."""
    there: dict[int, float] = {}
    spans: list[tuple[int, float, float]] = []
    begins = False  # a controller starts, whose first fleet is present at once

    def leave(replica: int, at_s: float) -> None:
        spans.append((replica, there.pop(replica), at_s))

    known = False
    for stamped in happened:
        event = stamped.event
        if isinstance(event, RunStarted):
            begins = True
            for replica in list(there):
                leave(replica, stamped.at_s)
        elif isinstance(event, Scaled):
            there |= dict.fromkeys(event.replicas, stamped.at_s) if begins else {}
            begins, known = False, True
        elif isinstance(event, PartStarted) and known and (match := _REPLICA.fullmatch(event.part)):
            there.setdefault(int(match[1]), stamped.at_s)
        elif isinstance(event, ReplicaLeft) and event.replica in there:
            leave(event.replica, stamped.at_s)
    spans += [(replica, start_s, math.inf) for replica, start_s in there.items()]
    if not known:
        spans = [(replica, -math.inf, math.inf) for replica in range(replicas)]
    replica_of, start, end = zip(*spans, strict=True) if spans else ((), (), ())
    return Presence(np.array(replica_of, np.int32), np.array(start, np.float64), np.array(end, np.float64))


def with_last_settings(config: RunConfig, happened: Sequence[Happened], *, by_control: bool = True) -> RunConfig:
    """Return the config with the last fleet size and the last changed settings, from which remedies start.

    `by_control=False` leaves out changes of `staleness.control`.
    """
    events = [
        stamped.event
        for stamped in happened
        if by_control or not isinstance(stamped.event, SettingChanged) or stamped.event.by == "user"
    ]
    fleets = [event for event in events if isinstance(event, Scaled)]
    values = last_settings(events) | ({"rollout.replicas": len(fleets[-1].replicas)} if fleets else {})
    for name, value in values.items():
        section, _, key = name.partition(".")
        changed = getattr(config, section).model_copy(update={key: value})
        if changed != getattr(config, section):
            config = config.model_copy(update={section: changed})
    return config


def changes_by_user(happened: Iterable[Happened]) -> tuple[str, ...]:
    """Return words of each change that a user made while the run was running, resumes left out.

    E.g. "staleness.max_staleness=2 after step 40".
    """
    step, begins, found = 0, False, list[str]()
    for stamped in happened:
        event = stamped.event
        if isinstance(event, RunStarted):
            begins = True  # a controller, whose first fleet is no change
        elif isinstance(event, Stepped | RolledBack):
            step = event.step
        elif isinstance(event, Scaled):
            found += [] if begins else [f"rollout.replicas={len(event.replicas)} after step {step}"]
            begins = False
        elif isinstance(event, SettingChanged) and event.by == "user":
            found.append(f"{event.name}={event.value} after step {event.step}")
    return tuple(found)


_KINDS = [  # of events that are not about one trajectory
    kind.__struct_config__.tag for kind in get_args(AnyEvent) if "trajectory_id" not in kind.__struct_fields__
]
EventKind = TypeVar("EventKind")


@dataclass(frozen=True, slots=True)
class Stop:
    """Time without a controller, e.g. `Stop(130.0, 1_290.0, 40)`: its resume began with step 40 done."""

    begin_s: float
    end_s: float
    step: int


@dataclass(frozen=True)
class History:
    """Events that are not about one trajectory, in the order of the log."""

    happened: tuple[Happened, ...]
    starts_s: Times  # start of each controller
    stops_s: Times  # last event before each later start

    def of_kind(self, kind: type[EventKind]) -> Iterator[tuple[float, EventKind]]:
        """Iterate over (time, event) of one type."""
        return ((stamped.at_s, stamped.event) for stamped in self.happened if isinstance(stamped.event, kind))

    @cached_property
    def steps(self) -> tuple[tuple[float, Stepped], ...]:
        """Learner steps that were not undone, with their end times."""
        steps: list[tuple[float, Stepped]] = []
        for stamped in self.happened:
            if isinstance(stamped.event, Stepped):
                steps.append((stamped.at_s, stamped.event))
            elif isinstance(stamped.event, RolledBack):
                last = stamped.event.step
                steps = [(at_s, step) for at_s, step in steps if step.step <= last]
        return tuple(steps)

    @property
    def stops(self) -> list[Stop]:
        """Times between the last event of a controller and the start of the next, in order."""
        starts = list(self.of_kind(RunStarted))[-len(self.stops_s) :] if len(self.stops_s) else []
        return [
            Stop(begin_s, at_s, started.resumed_step or 0)
            for begin_s, (at_s, started) in zip(self.stops_s.tolist(), starts, strict=True)
            if at_s > begin_s
        ]

    @cached_property
    def learner_turns(self) -> list[tuple[float, float]]:
        """The learner's turns on shared devices, hand-overs included: begin and seconds of each whole turn."""
        turns, begin_s = list[tuple[float, float]](), math.nan
        for at_s, event in self.of_kind(Leased):
            if event.holder == "learner":
                begin_s = at_s - event.elapsed_s
            elif not math.isnan(begin_s):
                turns.append((begin_s, at_s - begin_s))
                begin_s = math.nan
        return turns

    @cached_property
    def skipped(self) -> tuple[int, ...]:
        """Steps whose loss or gradient was not finite when they were last done."""
        steps: set[int] = set()
        for stamped in self.happened:
            if isinstance(stamped.event, Stepped):
                steps.discard(stamped.event.step)  # `StepSkipped` follows if it was skipped again
            elif isinstance(stamped.event, StepSkipped):
                steps.add(stamped.event.step)
        return tuple(sorted(steps))

    @property
    def undone_tokens(self) -> int:
        """Tokens of steps that were rolled back."""
        done = sum(step.num_tokens for _, step in self.of_kind(Stepped))
        return done - sum(step.num_tokens for _, step in self.steps)

    @property
    def evaluations(self) -> list[Evaluated]:
        """Evaluations of all sets, by seconds of RL."""
        return in_order(event for _, event in self.of_kind(Evaluated))

    @property
    def evaluations_by_set(self) -> dict[str, list[Evaluated]]:
        """Evaluations of each set, by seconds of RL; the sets in the order of the config."""
        sets: dict[str, list[Evaluated]] = {}
        for evaluation in sorted(self.evaluations, key=lambda evaluation: pass_number(evaluation.pass_id)):
            sets.setdefault(evaluation.set_name, [])
        for evaluation in self.evaluations:
            sets[evaluation.set_name].append(evaluation)
        return sets

    @property
    def left_word(self) -> str:
        """Name of trajectories without an end: "never trained" once the run has finished, else "still live"."""
        ends = [stamped.event for stamped in self.happened if isinstance(stamped.event, RunEnded)]
        return "never trained" if not self.live and ends and ends[-1].reason == "finished" else "still live"

    @property
    def live(self) -> bool:
        """Whether the run has not recorded its end; true also for a killed run."""
        last = [stamped.event for stamped in self.happened if isinstance(stamped.event, RunStarted | RunEnded)]
        return bool(last) and isinstance(last[-1], RunStarted)


def read_history(connection: sqlite3.Connection, times: RunTimes) -> History:
    """Read the events of a run that are not about one trajectory, by one scan of the log.

    It leaves out events of kinds that only a later release knows.
    """
    known = ", ".join(f"'{kind}'" for kind in _KINDS)
    rows = connection.execute(f"SELECT seq, mono, body FROM event WHERE kind IN ({known}) ORDER BY seq").fetchall()
    seq, mono, bodies = zip(*rows, strict=True) if rows else ((), (), ())
    at = times.at(seq, mono).tolist() if rows else []
    events = tuple(Happened(at_s, decode_event(body)) for at_s, body in zip(at, bodies, strict=True))
    return History(events, times.starts_s, times.stops_s)


class _Summary(msgspec.Struct, frozen=True):
    rl_seconds: float = 0.0  # absent in the summary of `laminar eval`


_Kind = TypeVar("_Kind", Summary, _Summary)


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows of the files beside the ledger, in order of time."""

    steps: tuple[StepRow, ...]  # without undone steps
    fleet: tuple[FleetRow, ...]
    rl_s: float  # seconds of RL so far, the largest in any file


def read_samples(folder: Path) -> Samples:
    """Read the row files and the summary of a run; the summary exists once the run has ended."""
    fleet = tuple(read_rows(folder / "fleet.jsonl", FleetRow))
    steps = tuple(read_rows(folder / "metrics.jsonl", StepRow))
    last_s = (max((row.rl_s for row in steps), default=0.0), max((row.rl_s for row in fleet), default=0.0))
    return Samples(_without_repeated(steps), fleet, max(summary_seconds(folder), *last_s))


def read_steps(folder: Path) -> tuple[StepRow, ...]:
    """Read the rows of a run's steps, without undone ones."""
    return _without_repeated(read_rows(folder / "metrics.jsonl", StepRow))


def _without_repeated(done: Iterable[StepRow]) -> tuple[StepRow, ...]:
    """Return the steps without steps that a later row repeats, after a rollback."""
    steps: list[StepRow] = []
    for row in done:
        while steps and steps[-1].step >= row.step:
            steps.pop()
        steps.append(row)
    return tuple(steps)


def read_summary(folder: Path) -> Summary | None:
    """Read `summary.json`, None without one. Raises `ConfigError` for another format."""
    return _decode_summary(folder, Summary)


def summary_seconds(folder: Path) -> float:
    """Read the seconds of RL from `summary.json`, 0 without one. Raises `ConfigError` for another format."""
    found = _decode_summary(folder, _Summary)
    return 0.0 if found is None else found.rl_seconds


def _decode_summary(folder: Path, kind: type[_Kind]) -> _Kind | None:
    summary = folder / "summary.json"
    if not summary.is_file():
        return None
    try:
        return msgspec.json.decode(summary.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{summary}: {error}; delete it to use the figures of the last step") from error


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run at one moment; times in seconds since its first trajectory was issued."""

    run: Path  # folder or ledger, as given
    name: str
    config: RunConfig | None  # with the present values of settings; None: the folder has no config.yaml
    written: RunConfig | None  # as config.yaml has it
    seq: int  # of the last event
    end_s: float  # time of the last event
    heard_s: float  # the same in seconds since 1970, long ago if the run was killed
    all_trajectories: Trajectories  # of training and evaluations
    residences: Residences  # of all trajectories; open residences end at `end_s`
    history: History
    recomputed: int  # tokens prefilled again after a move or new weights
    replays: Ints  # [replays, 2] step and staleness of each, without undone ones
    samples: Samples

    @cached_property
    def trajectories(self) -> Trajectories:
        """The training trajectories."""
        return self.all_trajectories.where(~self.is_eval)

    @cached_property
    def is_eval(self) -> BoolArray:
        """Whether each of `all_trajectories` [N] is an evaluation."""
        return self.all_trajectories.is_kind(Kind.EVAL)

    def places(self, residences: Residences) -> npt.NDArray[np.int64]:
        """Return the place [M] in `all_trajectories` of each residence's trajectory."""
        places: npt.NDArray[np.int64] = np.searchsorted(self.all_trajectories.number, residences.trajectory)
        return places

    def ids(self, numbers: Ints) -> list[str]:
        """Read the ids of trajectories with these ascending numbers from the ledger."""
        query = "SELECT id FROM trajectory WHERE number IN (SELECT value FROM json_each(?)) ORDER BY number"
        with reading(self.run) as connection:
            return [id for (id,) in connection.execute(query, (json.dumps(numbers.tolist()),))]


def read_snapshot(run: Path) -> Snapshot:
    """Read a snapshot of a run folder or a ledger, in one state of the ledger.

    The snapshot ends at the last time that any trajectory or event has, and open residences end there too. The
    config is None for a ledger without a `config.yaml` beside it. Raises a one-line `ConfigError` without a
    readable ledger, or for a bad config.
    """
    folder = ledger_path(run).parent
    path = folder / "config.yaml"
    config = load_config(path, []) if path.is_file() else None
    with reading(run) as connection:
        has_environment = config is not None and config.has_environment
        trajectories = read_trajectories(connection, has_environment=has_environment)
        if not len(trajectories):  # times count from the start then
            begun = connection.execute("SELECT coalesce(min(wall), 0) FROM event WHERE seq = 1").fetchone()[0]
            trajectories = replace(trajectories, origin_s=begun)
        times = RunTimes(connection, trajectories.origin_s)
        history = read_history(connection, times)
        last_event = "SELECT head.seq, coalesce(wall, 0.0) FROM head LEFT JOIN event USING (seq)"
        seq, heard_s = connection.execute(last_event).fetchone()
        end_s = max([0.0, trajectories.last_s, *(stamped.at_s for stamped in history.happened[-1:])])
        return Snapshot(
            run=run,
            name=folder.resolve().name,
            config=None if config is None else with_last_settings(config, history.happened),
            written=config,
            seq=seq,
            end_s=end_s,
            heard_s=heard_s,
            all_trajectories=trajectories,
            residences=read_residences(connection, times).until(end_s).with_environments(trajectories),
            history=history,
            recomputed=_read_recomputed(connection),
            replays=_read_replays(connection),
            samples=read_samples(folder),
        )


def _read_replays(connection: sqlite3.Connection) -> Ints:
    """Read [replays, 2] step and staleness of each replayed training trajectory."""
    rows = connection.execute("SELECT step, staleness FROM replay WHERE NOT undone ORDER BY seq").fetchall()
    return np.array(rows, np.int32).reshape(-1, 2)


def _read_recomputed(connection: sqlite3.Connection) -> int:
    """Read the tokens that replicas prefilled again when they continued a begun training trajectory."""
    length = "json_extract(body, '$.length')"
    (tokens,) = connection.execute(
        f"SELECT coalesce(sum({length} + length(ids) / 4), 0) FROM event"
        " CROSS JOIN trajectory ON trajectory.id = subject CROSS JOIN prompt ON prompt.id = prompt_id"
        f" WHERE event.kind = 'assigned' AND {length} > 0 AND trajectory.kind = ?",
        (Kind.TRAIN,),
    ).fetchone()
    return int(tokens)
