"""From one schema of the ledger to the next. Owns what each release changed; used when a ledger is opened.

A writer migrates the file in one transaction, all or nothing. A reader leaves it as it is and looks at it through
views of its own that show the newest columns. Migrations are SQL and never call code that moves on with later
releases. Invariant: the event log is not touched; events that have new fields have defaults for them.
"""

import json
import re
import sqlite3
from dataclasses import dataclass

from laminar_py.records.digests import token_reward_digest


@dataclass(frozen=True, slots=True)
class Migration:
    """To schema `to`, from the one before it."""

    to: int
    tables: dict[str, str]  # tables whose columns changed: all columns in their new order, from `{source}`
    fill: str  # script that a writer runs afterwards, for what follows from the events


MIGRATIONS = (
    Migration(
        4,
        {
            "prompt": "SELECT id, idx, ids, text, answer, '' AS task, digest FROM {source}",
            "trajectory": "SELECT *, NULL AS score_s, NULL AS issued_s, NULL AS started_s, NULL AS finished_s,"
            " NULL AS scored_s, NULL AS ready_s, NULL AS ended_s FROM {source}",
            "token_reward": "SELECT *, token_reward_digest(trajectory, rewards) AS digest FROM {source}",
            "step": "SELECT seq, step, incarnation, num_trajectories, num_tokens, loss, grad_norm, reward,"
            " elapsed_s, 0.0 AS waited_s, 0.0 AS reference_s, undone FROM {source}",
        },
        # times by the clock of `machine.RunClock`: the wall at an incarnation's start, monotonic from there
        """
        CREATE TEMP TABLE run_clock AS SELECT seq, wall, mono FROM event WHERE seq = 1 OR kind = 'runstarted';
        CREATE TEMP TABLE moment AS
            SELECT subject, kind, body, (
                SELECT c.wall + (e.mono - c.mono) FROM run_clock c WHERE c.seq <= e.seq ORDER BY c.seq DESC LIMIT 1
            ) AS at
            FROM event e
            WHERE kind IN ('issued', 'assigned', 'finished', 'scored', 'ready', 'consumed', 'dropped');
        CREATE TEMP TABLE life AS
            SELECT subject,
                max(CASE kind WHEN 'scored' THEN elapsed_s(body) END) AS score_s,
                min(CASE kind WHEN 'issued' THEN at END) AS issued_s,
                min(CASE kind WHEN 'assigned' THEN at END) AS started_s,
                min(CASE kind WHEN 'finished' THEN at END) AS finished_s,
                min(CASE kind WHEN 'scored' THEN at END) AS scored_s,
                min(CASE kind WHEN 'ready' THEN at END) AS ready_s,
                max(CASE WHEN kind IN ('consumed', 'dropped') THEN at END) AS ended_s
            FROM moment GROUP BY subject;
        CREATE INDEX temp.life_of ON life (subject);
        UPDATE trajectory SET score_s = life.score_s, issued_s = life.issued_s, started_s = life.started_s,
            finished_s = life.finished_s, scored_s = life.scored_s, ready_s = life.ready_s,
            ended_s = CASE WHEN status IN ('consumed', 'dropped') THEN life.ended_s END
            FROM life WHERE life.subject = trajectory.id;
        DROP TABLE temp.run_clock;
        DROP TABLE temp.moment;
        DROP TABLE temp.life;
        """,
    ),
)
_EVERYTHING = "SELECT type, name, tbl_name, sql FROM main.sqlite_master"
OLDEST = MIGRATIONS[0].to - 1
NEWEST = MIGRATIONS[-1].to


def show_as_newest(connection: sqlite3.Connection, schema: int) -> None:
    """Have a reader's connection to a ledger of an older `schema` show the newest columns; the file stays."""
    _define_functions(connection)
    for table in _changed(schema):
        query = _newest_columns(table, schema, f"main.{table}")
        connection.execute(f"CREATE TEMP VIEW {table} AS {query}")


def migrate(connection: sqlite3.Connection, schema: int, script: str) -> None:
    """Bring the file from `schema` to the newest, which `script` lays out. Nothing is changed if it fails."""
    _define_functions(connection)
    statements = ["BEGIN IMMEDIATE"]
    layout = _layout(script)
    for table in _changed(schema):
        old = f"{table}_{schema}"
        statements += [
            f"ALTER TABLE {table} RENAME TO {old}",
            layout[table],
            f"INSERT INTO {table} {_newest_columns(table, schema, old)}",
            f"DROP TABLE {old}",
        ]
    statements += [migration.fill for migration in MIGRATIONS if migration.to > schema]
    statements += [f"PRAGMA user_version = {NEWEST}", "COMMIT"]
    try:
        connection.executescript(";\n".join(statements))
    except sqlite3.Error:
        connection.execute("ROLLBACK")
        raise


def layout_differences(connection: sqlite3.Connection, script: str) -> list[str]:
    """Tables and indexes of the file that are not as `script` lays them out; comments and spaces do not count."""
    empty = sqlite3.connect(":memory:")
    empty.executescript(script)
    found, expected = (
        {name: (kind, table, _plain(sql or "")) for kind, name, table, sql in one.execute(_EVERYTHING)}
        for one in (connection, empty)
    )
    empty.close()
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def mistyped(connection: sqlite3.Connection) -> list[str]:
    """Tables with values that are not of their column's type; of strict ones SQLite says so itself."""
    found = []
    loose = "SELECT name FROM main.sqlite_master WHERE type = 'table' AND sql NOT LIKE '% STRICT'"
    for (table,) in connection.execute(loose).fetchall():
        columns = connection.execute(f'PRAGMA main.table_info("{table}")').fetchall()
        wrong = [
            f"typeof(\"{name}\") NOT IN ('{kind.lower()}', '{kind.lower() if required or key else 'null'}')"
            for _, name, kind, required, _, key in columns
        ]
        if connection.execute(f'SELECT 1 FROM main."{table}" WHERE {" OR ".join(wrong)} LIMIT 1').fetchone():
            found.append(table)
    return found


def _changed(schema: int) -> list[str]:
    names = (table for migration in MIGRATIONS if migration.to > schema for table in migration.tables)
    return list(dict.fromkeys(names))


def _newest_columns(table: str, schema: int, source: str) -> str:
    """The query that makes of `source`, a table of `schema`, its newest columns."""
    query = f"SELECT * FROM {source}"
    for migration in MIGRATIONS:
        if migration.to > schema and table in migration.tables:
            query = migration.tables[table].format(source=f"({query})")
    return query


def _layout(script: str) -> dict[str, str]:
    empty = sqlite3.connect(":memory:")
    empty.executescript(script)
    layout = dict(empty.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall())
    empty.close()
    return layout


def _plain(sql: str) -> str:
    """Without comments, spaces, and the word that a table lacks which no migration has made anew."""
    return " ".join(re.sub(r"--[^\n]*", "", sql).split()).removesuffix(" STRICT")


def _elapsed_s(body: str) -> float:
    """Of an event; SQLite's own reading of a number is off by a bit at times."""
    return float(json.loads(body)["elapsed_s"])


def _define_functions(connection: sqlite3.Connection) -> None:
    connection.create_function("elapsed_s", 1, _elapsed_s, deterministic=True)
    connection.create_function("token_reward_digest", 2, token_reward_digest, deterministic=True)
