"""A closed run is sealed; what changes afterwards is named, and going on breaks the seal on record."""

import asyncio
import shutil
import sqlite3

import pytest

from laminar_lab.audit.verify import prove, verify
from laminar_py.ledger.database import LEDGER_NAME, SEAL_NAME, reading
from laminar_py.ledger.seal import read_seal, seal_digest, seal_run
from laminar_py.records.events import RunEnded
from tests.ledger.runs import begin, checkpoint, consume, make_ready, open_ledger


async def sealed_run(run):
    async with open_ledger(run) as ledger:
        begin(ledger, versions=(0, 1))
        for index in range(4):
            make_ready(ledger, f"g{index}.0", index=index)
        ledger.append_all(consume(1, 1, "g0.0", "g1.0"))
        ledger.append(checkpoint(1, 1))
        ledger.append(RunEnded(1, "finished"))
    for name in ("config.yaml", "metrics.jsonl", "summary.json"):
        (run / name).write_text(f"{name}\n")
    return seal_run(run)


async def test_a_sealed_run_is_proved_without_leaving_a_trace(tmp_path):
    seal = await sealed_run(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    verdict = prove(tmp_path)
    assert verdict.violations == []
    assert verdict.notes == [f"sealed: 5 files, event {seal.seq} is the last"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert not list(tmp_path.glob("*-wal"))


def edited(run):
    with (run / "summary.json").open("r+") as file:
        file.write("S")


def lengthened(run):
    (run / "metrics.jsonl").write_text("metrics.jsonl\n\n")


def removed(run):
    shutil.rmtree(run / "segments")


def added(run):
    shutil.copy(next((run / "segments").iterdir()), run / "segments" / "other.segment")


def truncated(run):
    path = run / LEDGER_NAME
    path.write_bytes(path.read_bytes()[:-5000])


def written(run):
    connection = sqlite3.connect(run / LEDGER_NAME)
    with connection:
        connection.execute("UPDATE step SET loss = 0")
    connection.close()


def unsealed(run):
    text = (run / SEAL_NAME).read_text()
    (run / SEAL_NAME).write_text(text.replace('"seq": ', '"seq": 1'))


def torn(run):
    (run / SEAL_NAME).write_bytes((run / SEAL_NAME).read_bytes()[:-30])


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (edited, "summary.json", "was changed: its digest differs from the seal"),
        (lengthened, "metrics.jsonl", "was changed: it has 15 bytes, the seal says 14"),
        (removed, "segments/", "is missing"),
        (added, "segments/other.segment", "was added after the run was sealed"),
        (truncated, LEDGER_NAME, "was changed: it has"),
        (written, LEDGER_NAME, "was changed"),
        (unsealed, SEAL_NAME, "was changed; restore the file"),
        (torn, SEAL_NAME, "cannot be read"),
    ],
)
async def test_what_is_not_as_it_was_sealed_is_named(tmp_path, damage, file, message):
    await sealed_run(tmp_path)
    damage(tmp_path)
    (found,) = (finding for finding in verify(tmp_path) if finding.rule == "seal")
    assert found.subject.startswith(file)
    assert message in found.message
    assert "\n" not in str(found)


async def test_what_is_written_beside_a_sealed_ledger_is_named(tmp_path):
    await sealed_run(tmp_path)
    connection = sqlite3.connect(tmp_path / LEDGER_NAME, isolation_level=None)
    connection.execute("UPDATE step SET loss = 0")  # stays in SQLite's log, the file is as it was
    (found, *_) = verify(tmp_path)
    connection.close()
    assert str(found) == (
        "law 11: seal: ledger.sqlite-wal: was added after the run was sealed: somebody wrote to the ledger"
    )


async def test_a_run_that_goes_on_breaks_its_seal_on_record(tmp_path):
    await sealed_run(tmp_path)
    digest = seal_digest(tmp_path)
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, incarnation=2, versions=())
    assert read_seal(tmp_path) is None
    with reading(tmp_path) as connection:
        rows = connection.execute("SELECT body FROM event WHERE kind = 'sealbroken'").fetchall()
    assert rows == [(f'{{"event":"sealbroken","digest":"{digest}"}}',)]
    verdict = prove(tmp_path)
    assert (verdict.violations, verdict.notes) == ([], ["not sealed: the run is running, or was killed"])
    seal_run(tmp_path)
    assert verify(tmp_path) == []


async def test_a_reader_that_holds_the_ledger_keeps_it_unsealed(tmp_path, monkeypatch):
    monkeypatch.setattr("laminar_py.ledger.database._BUSY_S", 0.05)
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        await ledger.commit()
        with reading(tmp_path) as connection:
            connection.execute("SELECT * FROM event").fetchone()
            make_ready(ledger, "g0.0")
            await ledger.commit()
            with pytest.raises(ValueError, match="an open reader blocks it"):
                await asyncio.to_thread(seal_run, tmp_path)
    assert read_seal(tmp_path) is None
