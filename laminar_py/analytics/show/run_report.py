"""All figures of one run, from its ledger and the files beside it. Called by the command line.

It works while the run goes on and after it was killed; a folder in which nothing has finished yet is refused.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from laminar_py.analytics.measure.drops import DropTable, table_of_drops
from laminar_py.analytics.measure.pipeline import Record, read_record
from laminar_py.analytics.measure.quality import Quality, read_quality
from laminar_py.analytics.measure.stragglers import Stragglers, measure_stragglers
from laminar_py.analytics.measure.tails import Tails, group_wait, measure_tails
from laminar_py.analytics.measure.tokens import TokenAccount, account_tokens
from laminar_py.analytics.read.columns import Trajectories
from laminar_py.analytics.read.samples import read_fleet, read_rl_seconds, read_steps
from laminar_py.analytics.read.scan import scan_events
from laminar_py.analytics.triage.reading import read_reading
from laminar_py.analytics.triage.triage import Diagnosis, diagnose
from laminar_py.analytics.triage.verdicts import verdicts
from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import reading
from laminar_py.records.trajectory import Kind, Status

_FINISHED = "SELECT 1 FROM trajectory WHERE kind = ? AND finish_reason IS NOT NULL LIMIT 1"


@dataclass(frozen=True, slots=True)
class Staleness:
    """Of consumed trajectories, in versions."""

    mean: float
    max: int
    counts: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run in figures."""

    run: str
    diagnosis: Diagnosis | None  # None before the first whole step
    steps: int
    trained_tokens: int
    tokens: TokenAccount
    tails: Tails
    stragglers: Stragglers
    drops: DropTable
    verdicts: tuple[str, ...]  # on dropping
    staleness: Staleness | None  # None before anything was consumed
    quality: Quality

    @property
    def rl_s(self) -> float:
        """Seconds of RL so far."""
        return self.tokens.rl_s

    @property
    def trained_tokens_per_s(self) -> float:
        """Response tokens in learner steps, whatever their weight."""
        return self.trained_tokens / self.rl_s if self.rl_s else 0.0


def read_report(run: Path) -> RunReport:
    """Raises `ValueError` with one line if `run` is no run folder, or nothing has finished in it."""
    with reading_run(run) as connection:
        return report_of(run, connection, read_record(run, connection))


@contextmanager
def reading_run(run: Path) -> Iterator[sqlite3.Connection]:
    """A connection to the ledger of a run in which something has finished. Raises `ValueError` of one line."""
    if run.is_file():
        raise ConfigError(f"run={run}: is a file; name the folder of a run, e.g. runs/quickstart-1")
    with reading(run) as connection:
        if connection.execute(_FINISHED, (Kind.TRAIN,)).fetchone() is None:
            raise ConfigError(f"run={run}: no trajectory has finished yet, so nothing can be said; wait for one")
        yield connection


def report_of(run: Path, connection: sqlite3.Connection, record: Record) -> RunReport:
    """What `record`, which was read by this connection, and the files beside the ledger come to."""
    scan = scan_events(connection)
    last_step, undone = connection.execute(
        "SELECT coalesce(max(step) FILTER (WHERE NOT undone), 0), coalesce(sum(num_tokens * undone), 0) FROM step"
    ).fetchone()
    steps = read_steps(run)
    quality = read_quality(connection, record.config, steps)
    trajectories, found = record.trajectories, read_reading(record)
    drops = table_of_drops(trajectories, scan.probes)
    return RunReport(
        run=str(run),
        diagnosis=None if found is None else diagnose(found, record.config),
        steps=last_step,
        trained_tokens=steps[-1].trained_tokens if steps else 0,
        tokens=account_tokens(trajectories, scan, undone=undone, rl_s=read_rl_seconds(run)),
        tails=measure_tails(trajectories),
        stragglers=measure_stragglers(trajectories, group_wait(trajectories), read_fleet(run)),
        drops=drops,
        verdicts=tuple(verdicts(drops)),
        staleness=_staleness(trajectories),
        quality=quality,
    )


def _staleness(trajectories: Trajectories) -> Staleness | None:
    staleness = trajectories.staleness[trajectories.is_status(Status.CONSUMED)]
    if not len(staleness):
        return None
    counts = Counter(staleness.tolist())
    return Staleness(float(staleness.mean()), int(staleness.max()), dict(sorted(counts.items())))
