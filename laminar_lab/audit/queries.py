"""Queries of a run's ledger for the command line. Reads only.

`run` is a run's folder or a ledger file. Every function raises `ConfigError` without a readable ledger.
"""

import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.ledger import (
    TRAJECTORY_COLUMNS,
    Accounting,
    TrajectoryRow,
    read_accounting,
    read_events,
    reading,
    trajectory_rows,
)
from laminar_py.records.events import SettingChanged
from laminar_py.records.trajectory import DropReason, Kind, Status

LARGEST = 2**63 - 1  # integer of SQLite
_COMPARISON = re.compile(r"(>=|<=|!=|>|<|=)?\s*(-?\d+(?:\.\d+)?)")
_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Conditions on trajectories to list, e.g. `Filters(status=Status.CONSUMED, staleness=">3")`; None: all.

    A comparison is a number, with `=`, `!=`, `<`, `<=`, `>` or `>=` before it.
    """

    status: Status | None = None
    reason: DropReason | None = None
    kind: Kind | None = None
    group: str | None = None
    prompt: str | None = None
    eval_set: str | None = None
    replica: int | None = None  # the last replica
    version: int | None = None  # a version of some of its tokens
    staleness: str | None = None  # comparison, as are the next three
    step: str | None = None  # step that consumed it
    reward: str | None = None
    length: str | None = None


def accounting(run: Path) -> Accounting:
    """Return counts of issued, consumed, dropped and live trajectories."""
    with reading(run) as connection:
        return read_accounting(connection)


def staleness_histogram(run: Path, *, replayed: bool = False) -> dict[int, int]:
    """Return the number of consumed trajectories, or of replays, by staleness, lowest first."""
    rows = "replay WHERE NOT undone" if replayed else "trajectory WHERE status = 'consumed' AND kind = 'train'"
    with reading(run) as connection:
        query = f"SELECT staleness, count(*) FROM {rows} GROUP BY staleness ORDER BY staleness"
        return dict(connection.execute(query).fetchall())


def setting_changes(run: Path) -> list[SettingChanged]:
    """Return the changes of settings during the run, in the order of the log."""
    with reading(run) as connection:
        return list(read_events(connection, SettingChanged))


def listing(run: Path, filters: Filters, *, limit: int | None = None) -> Iterator[TrajectoryRow]:
    """Iterate over trajectories that pass all filters, in order of issue. Raises `ConfigError`."""
    where, values = condition(filters)
    with reading(run) as connection:
        yield from trajectory_rows(connection, where, values, limit=limit)


def row_record(row: TrajectoryRow) -> dict[str, object]:
    """Return a row as JSON values by column."""
    return dict(zip(TRAJECTORY_COLUMNS, msgspec.to_builtins(row), strict=True))


def count(run: Path, filters: Filters) -> int:
    """Return the number of trajectories that pass all filters. Raises `ConfigError` for a bad comparison."""
    where, values = condition(filters)
    with reading(run) as connection:
        (found,) = connection.execute(f"SELECT count(*) FROM trajectory WHERE {where}", values).fetchone()
    return int(found)


def condition(filters: Filters) -> tuple[str, tuple[object, ...]]:
    """Return filters as an SQL condition on `trajectory` with its parameters. Raises `ConfigError`."""
    wanted: dict[str, str | int | float | None] = {
        "status = ?": filters.status,
        "drop_reason = ?": filters.reason,
        "kind = ?": filters.kind,
        "group_id = ?": filters.group,
        "prompt_id = ?": filters.prompt,
        f"kind = '{Kind.EVAL}' AND substr(group_id, instr(group_id, '-') + 1) = ?": filters.eval_set,
        "replica = ?": filters.replica,
        "? BETWEEN oldest_version AND newest_version": filters.version,
    }
    for column in ("staleness", "step", "reward", "length"):
        comparison = getattr(filters, column)
        if comparison is not None:
            sign, number = parse_comparison(comparison, field=column)
            wanted[f"{column} {sign} ?"] = number
    for column in ("replica", "version"):
        number = getattr(filters, column)
        if number is not None and not -LARGEST <= number <= LARGEST:
            raise ConfigError(f"{column}={number}: no such number is on record; give one below 2^63")
    used = {words: value for words, value in wanted.items() if value is not None}
    values = tuple(str(value) if isinstance(value, str) else value for value in used.values())  # enums too
    return " AND ".join(used) or "1", values


def parse_comparison(text: str, *, field: str) -> tuple[str, float]:
    """Return sign and number of a comparison, e.g. `(">", 3.0)` for `>3`. Raises `ConfigError`."""
    match = _COMPARISON.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{field}={text}: not a comparison; write for example '>3', '<=1' or '2'")
    return match[1] or "=", float(match[2])


def select(run: Path, statement: str, *, show: Callable[[list[str], Iterator[tuple[object, ...]]], None]) -> None:
    """Run an SQL statement, and call `show` with its columns and rows.

    Raises `ConfigError` for a statement that is invalid or does more than read.
    """
    with reading(run) as connection:
        connection.set_authorizer(_may_read)
        try:
            cursor = connection.execute(statement)
            if cursor.description is None:
                raise sqlite3.ProgrammingError("it returns no rows")
            show([column for column, *_ in cursor.description], cursor)
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise ConfigError(
                f"sql={statement!r}: {error}; write one SELECT over tables of the ledger, e.g. trajectory"
            ) from None
        finally:
            connection.set_authorizer(None)


def _may_read(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY
