"""Snapshot of a run: everything that its figures and pictures are made of, from one state of the ledger.

Called by the report, the end of a run and the dashboard. Reads the run folder only, also of a run that is still
going on; the reading never holds up its writer.
"""

import json
import sqlite3
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from laminar_py.config.loading import load_config
from laminar_py.config.run import RunConfig
from laminar_py.ledger.database import ledger_path, reading
from laminar_py.observe.analytics.read.columns import Ints, Times, Trajectories, read_trajectories
from laminar_py.observe.analytics.read.fleet import with_last_fleet
from laminar_py.observe.analytics.read.history import History, read_history
from laminar_py.observe.analytics.read.samples import Samples, read_samples
from laminar_py.observe.analytics.read.stays import RunTimes, Stays, read_stays
from laminar_py.records.codec import BoolArray
from laminar_py.records.trajectory import Kind

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
        recomputed=read_recomputed(connection),
        samples=read_samples(folder),
    )


def read_recomputed(connection: sqlite3.Connection) -> int:
    """Tokens of prompt and response that replicas computed again when they took up a begun training trajectory."""
    (tokens,) = connection.execute(
        "SELECT coalesce(sum(json_extract(body, '$.length') + length(ids) / 4), 0) FROM event"
        " CROSS JOIN trajectory ON trajectory.id = subject CROSS JOIN prompt ON prompt.id = prompt_id"
        " WHERE event.kind = 'assigned' AND json_extract(body, '$.length') > 0 AND trajectory.kind = ?",
        (Kind.TRAIN,),
    ).fetchone()
    return int(tokens)
