"""A ledger of an earlier release stays readable as it is, and a run on it goes on."""

import sqlite3
from pathlib import Path

import pytest

from laminar_py.audit.queries import Filters, accounting, listing
from laminar_py.audit.story import story
from laminar_py.audit.verify import prove
from laminar_py.ledger import migrations
from laminar_py.ledger.database import LEDGER_NAME, SCHEMA_VERSION, create, open_writer, reading, schema_of
from laminar_py.ledger.recovery import recover
from laminar_py.records.events import RunStarted
from tests.ledger.runs import consume, make_ready, open_ledger, tokens

OLD = Path(__file__).with_name("data") / "schema3.sql"  # written by that release


def old_ledger(run):
    connection = sqlite3.connect(run / LEDGER_NAME)
    connection.executescript(OLD.read_text())
    connection.close()
    return run / LEDGER_NAME


def rows(path, sql):
    connection = sqlite3.connect(path)
    found = connection.execute(sql).fetchall()
    connection.close()
    return found


def test_readers_see_the_newest_columns_and_leave_the_file_as_it_is(tmp_path):
    path = old_ledger(tmp_path)
    before = path.read_bytes()
    verdict = prove(tmp_path)
    assert verdict.findings == []
    assert "of schema 3, before 4: what the newer one adds is not compared" in verdict.notes
    assert accounting(tmp_path).balanced
    assert [row.issued_s for row in listing(tmp_path, Filters())] == [None] * 7
    assert story(tmp_path, "g0.0").response.ids.tolist() == tokens("g0.0", 0, 5)[0].tolist()
    assert len(recover(tmp_path).live) == 3
    assert path.read_bytes() == before


def test_tampering_with_an_old_ledger_is_found(tmp_path):
    connection = sqlite3.connect(old_ledger(tmp_path))
    with connection:
        connection.execute("UPDATE trajectory SET reward = 0.5 WHERE id = 'g0.0'")
    connection.close()
    assert [str(finding) for finding in prove(tmp_path).findings] == [
        "rows: g0.0: reward is 0.5, the events say 1.0"
    ]


async def test_a_writer_migrates_and_the_run_goes_on(tmp_path):
    path = old_ledger(tmp_path)
    async with open_ledger(tmp_path) as ledger:
        ledger.append(
            RunStarted(
                incarnation=2,
                host="host-1",
                pid=7,
                schema=SCHEMA_VERSION,
                config_digest="c0",
                drain=False,
                max_staleness=None,
                resumed_step=1,
            )
        )
        make_ready(ledger, "g9.0", index=9)
        ledger.append_all(consume(2, 1, "g9.0"))
    assert prove(tmp_path).findings == [], "what was filled in is what a replay of the events gives"
    (times,) = rows(path, "SELECT issued_s, started_s, scored_s, ended_s FROM trajectory WHERE id = 'g0.0'")
    assert None not in times
    assert list(times) == sorted(times)
    assert rows(path, "SELECT score_s FROM trajectory WHERE id = 'g0.0'") == [(0.01,)]
    assert rows(path, "SELECT ended_s FROM trajectory WHERE id = 'g1.0'") == [(None,)], "its step was undone"


def test_a_migrated_ledger_is_laid_out_as_a_new_one(tmp_path):
    open_writer(old_ledger(tmp_path)).close()
    new = sqlite3.connect(":memory:")
    create(new)
    for table, _ in rows(tmp_path / LEDGER_NAME, "SELECT name, 1 FROM sqlite_master WHERE type = 'table'"):
        query = f"SELECT name, type, \"notnull\", pk FROM pragma_table_info('{table}')"
        assert rows(tmp_path / LEDGER_NAME, query) == new.execute(query).fetchall()
    new.close()
    with reading(tmp_path) as connection:
        assert schema_of(connection) == SCHEMA_VERSION


def test_a_migration_that_fails_changes_nothing(tmp_path, monkeypatch):
    path = old_ledger(tmp_path)
    broken = migrations.Migration(4, migrations.MIGRATIONS[0].tables, "SELECT * FROM nowhere")
    monkeypatch.setattr(migrations, "MIGRATIONS", (broken,))
    before = rows(path, "SELECT * FROM trajectory")
    with pytest.raises(ValueError, match="no such table: nowhere"):
        open_writer(path)
    assert rows(path, "SELECT * FROM trajectory") == before
    assert rows(path, "PRAGMA user_version") == [(3,)]


async def test_an_event_of_a_later_release_is_passed_over_and_said(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        ledger.append(
            RunStarted(
                incarnation=1,
                host="host-1",
                pid=7,
                schema=SCHEMA_VERSION,
                config_digest="c0",
                drain=False,
                max_staleness=None,
            )
        )
        make_ready(ledger, "g0.0")
    connection = sqlite3.connect(tmp_path / LEDGER_NAME)
    with connection:
        append_unknown(connection, "praised", "g0.0")
        connection.execute("UPDATE trajectory SET last_seq = last_seq + 1")
    connection.close()
    assert story(tmp_path, "g0.0").events[-1].event == "praised"
    verdict = prove(tmp_path)
    assert "events of a later release, passed over: 1 praised" in verdict.notes
    assert {finding.law for finding in verdict.findings} == {"rows"}, "its last event is one that nobody knows"


def append_unknown(connection, kind, subject):
    """A well-formed event that this release does not know."""
    from laminar_py.records.digests import event_hash

    seq, previous = connection.execute("SELECT seq, hash FROM head").fetchone()
    body = f'{{"event":"{kind}","trajectory_id":"{subject}"}}'
    hash = event_hash(previous, seq + 1, 1.0, 1.0, "host-1", kind, subject, body.encode())
    connection.execute(
        "INSERT INTO event VALUES (?, 1.0, 1.0, 'host-1', ?, ?, ?, ?)", (seq + 1, kind, subject, body, hash)
    )
    connection.execute("UPDATE head SET seq = ?, hash = ?", (seq + 1, hash))
