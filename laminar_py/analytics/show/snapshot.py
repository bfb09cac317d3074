"""One look at a run: all that its pictures and figures are drawn from, of one state of the ledger.

Called by the report, the trace and the dashboard. Reads the run folder only, also of a run that is still going on;
the reading never holds up its writer.
"""

import sqlite3
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from laminar_py.analytics.measure.pipeline import Record
from laminar_py.analytics.read.columns import Times, Trajectories, read_trajectories
from laminar_py.analytics.read.history import History, read_history
from laminar_py.analytics.read.samples import FleetLine, StepLine, read_lines, read_rl_seconds, read_steps
from laminar_py.analytics.read.stays import RunTimes, Stays, read_stays
from laminar_py.ledger.database import ledger_path, reading
from laminar_py.records.codec import BoolArray
from laminar_py.records.events import Evaluated, RunEnded, RunStarted
from laminar_py.records.trajectory import Kind, Status


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at a moment; times in seconds since its first trajectory was issued."""

    name: str
    seq: int  # of the last event
    end_s: float  # when that was
    live: bool  # it has not ended, by its own word: it goes on, or was killed
    heard_s: float  # when that event was, in seconds since 1970: long ago if it was killed
    trajectories: Trajectories  # of training
    everyone: Trajectories  # and of evaluations too
    is_eval: BoolArray  # [N] of everyone
    stays: Stays  # of everyone
    history: History
    metrics: tuple[StepLine, ...]
    fleet: tuple[FleetLine, ...]
    rl_s: float  # seconds of RL so far

    @property
    def useful_tokens(self) -> int:
        """As in `tokens.TokenAccount`: of steps that stand, each weighed as its loss was."""
        train = self.trajectories
        stands = train.is_status(Status.CONSUMED) & ~np.isin(train.step, list(self.history.skipped))
        return round(float(np.sum(train.length[stands] * train.weight[stands].astype(np.float64))))

    @property
    def goodput(self) -> float:
        """Useful tokens a second of RL."""
        return self.useful_tokens / self.rl_s if self.rl_s else 0.0

    @property
    def accuracy(self) -> float | None:
        """Held out, the last one."""
        return self.accuracies[-1][1] if self.accuracies else None

    @property
    def accuracies(self) -> list[tuple[float, float]]:
        """(seconds of RL, held-out accuracy)."""
        return sorted((event.rl_s, event.accuracy) for _, event in self.history.of(Evaluated))

    def places(self, stays: Stays) -> npt.NDArray[np.int64]:
        """[M] of the trajectories of these stays, among everyone."""
        found: npt.NDArray[np.int64] = np.searchsorted(self.everyone.number, stays.trajectory)
        return found

    def at_rl(self, rl_s: Times) -> Times:
        """Times of moments that are known by seconds of RL, which pause for evaluations; by the steps between."""
        ends = {step.step: at_s for at_s, step in self.history.steps}
        known = [(line.rl_s, ends[line.step]) for line in self.metrics if line.step in ends]
        if not known:
            return rl_s
        of_rl, of_run = np.maximum.accumulate(np.array(known).T, axis=1)
        before, after = of_run[0] - of_rl[0], of_run[-1] - of_rl[-1]
        inside = np.interp(rl_s, of_rl, of_run)
        found: Times = np.where(rl_s < of_rl[0], rl_s + before, np.where(rl_s > of_rl[-1], rl_s + after, inside))
        return found


def read_snapshot(run: Path) -> Snapshot:
    """Everything. Raises a one-line `ValueError` if there is no readable ledger."""
    with reading(run) as connection:
        return snapshot_of(run, connection)


def snapshot_of(run: Path, connection: sqlite3.Connection, record: Record | None = None) -> Snapshot:
    """Everything that `connection` sees; what `record` has of it is not read again."""
    folder = ledger_path(run).parent
    train = read_trajectories(connection) if record is None else record.trajectories
    evals = read_trajectories(connection, kind=Kind.EVAL)
    if not len(train) + len(evals):  # times count from the start then
        begun = connection.execute("SELECT coalesce(min(wall), 0) FROM event WHERE seq = 1").fetchone()[0]
        train, evals = replace(train, origin_s=begun), replace(evals, origin_s=begun)
    everyone, is_eval = _joined(train, evals)
    times = RunTimes(connection, train.origin_s)
    history = read_history(connection, times)
    stays = read_stays(connection, times) if record is None else record.stays
    heard = "SELECT head.seq, coalesce(wall, 0.0) FROM head LEFT JOIN event USING (seq)"
    seq, heard_s = connection.execute(heard).fetchone()
    known = [everyone.ended_s, everyone.finished_s, everyone.started_s, everyone.issued_s]
    latest = [float(np.nanmax(times)) for times in known if np.any(~np.isnan(times))]
    end_s = max([0.0, *latest, *(one.at_s for one in history.happened[-1:])])
    return Snapshot(
        name=folder.resolve().name,
        seq=seq,
        end_s=end_s,
        live=not _has_ended(history),
        heard_s=heard_s,
        trajectories=train,
        everyone=everyone,
        is_eval=is_eval,
        stays=stays.until(end_s),
        history=history,
        metrics=tuple(read_steps(folder)),
        fleet=tuple(read_lines(folder / "fleet.jsonl", FleetLine)),
        rl_s=read_rl_seconds(folder),
    )


def _has_ended(history: History) -> bool:
    last = [one.event for one in history.happened if isinstance(one.event, RunStarted | RunEnded)]
    return not last or isinstance(last[-1], RunEnded)


def _joined(train: Trajectories, evals: Trajectories) -> tuple[Trajectories, BoolArray]:
    """Both, in the order of issue; and which are the evaluations."""
    order = np.argsort(np.concatenate([train.number, evals.number]), kind="stable")
    columns: dict[str, Any] = {
        field.name: np.concatenate([getattr(train, field.name), getattr(evals, field.name)])[order]
        for field in fields(train)
        if isinstance(getattr(train, field.name), np.ndarray)
    }
    return replace(train, **columns), order >= len(train)
