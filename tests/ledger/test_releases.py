"""Ledgers of other releases: another schema is refused, events that this release does not know are skipped."""

import sqlite3

import pytest

from laminar_lab.audit.samples import read_sample
from laminar_lab.audit.verify import prove
from laminar_lab.report.snapshot import read_snapshot
from laminar_py.ledger.database import LEDGER_NAME, SCHEMA_VERSION, LedgerError, open_writer
from laminar_py.ledger.recovery import recover
from tests.ledger.runs import begin, make_ready, open_ledger


@pytest.mark.parametrize(("schema", "age"), [(SCHEMA_VERSION - 1, "an older"), (SCHEMA_VERSION + 1, "a later")])
async def test_a_ledger_of_another_schema_is_refused_in_one_line_and_stays_as_it_is(tmp_path, schema, age):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
    path = tmp_path / LEDGER_NAME
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {schema}")
    connection.close()
    before = path.read_bytes()
    for use in (lambda: open_writer(path), lambda: prove(tmp_path), lambda: recover(tmp_path)):
        with pytest.raises(LedgerError) as refused:
            use()
        assert str(refused.value) == (
            f"ledger={path}: {age} release wrote it with schema {schema}, this one has schema {SCHEMA_VERSION};"
            " use the release that wrote it"
        )
    assert path.read_bytes() == before


async def test_an_event_of_a_later_release_is_passed_over_and_said(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0,))
        make_ready(ledger, "g0.0")
    connection = sqlite3.connect(tmp_path / LEDGER_NAME)
    with connection:
        append_unknown(connection, "praised", "g0.0")
        connection.execute("UPDATE trajectory SET last_seq = last_seq + 1")
    connection.close()
    assert read_sample(tmp_path, "g0.0").story.events[-1].event == "praised"
    assert len(read_snapshot(tmp_path).history.happened) == 2, "the start and version 0"
    verdict = prove(tmp_path)
    assert "skipped events of a later release: 1 praised" in verdict.notes
    assert {found.rule for found in verdict.violations} == {"rows"}, "its last event is one that nobody knows"


def append_unknown(connection, kind, subject):
    """A well-formed event that this release does not know."""
    from laminar_py.records.codec import event_hash

    seq, previous = connection.execute("SELECT seq, hash FROM head").fetchone()
    body = f'{{"event":"{kind}","trajectory_id":"{subject}"}}'
    stamp = {"seq": seq + 1, "wall": 1.0, "mono": 1.0, "host": "host-1"}
    hash = event_hash(previous, **stamp, kind=kind, subject=subject, body=body.encode())
    connection.execute(
        "INSERT INTO event VALUES (?, 1.0, 1.0, 'host-1', ?, ?, ?, ?)", (seq + 1, kind, subject, body, hash)
    )
    connection.execute("UPDATE head SET seq = ?, hash = ?", (seq + 1, hash))
