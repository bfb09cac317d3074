"""A ledger on a network file system: no write-ahead log, readers beside the writer, and a crash in the middle."""

import shutil
import sqlite3
from contextlib import closing

import pytest

from laminar_lab.audit.verify import verify
from laminar_py.ledger import database
from laminar_py.ledger.database import (
    LEDGER_NAME,
    SEAL_NAME,
    LedgerError,
    logs_of,
    on_network,
    open_writer,
    reading,
)
from laminar_py.ledger.seal import seal_run
from tests.ledger.runs import begin, make_ready, open_ledger

ROOT = "22 1 8:1 / / rw - ext4 /dev/sda1 rw"


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setattr(database, "on_network", lambda folder: True)


async def test_readers_see_what_is_committed_and_no_log_is_made(tmp_path, network):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        make_ready(ledger, "g0.0")
        await ledger.commit()
        assert not list(tmp_path.glob("*-wal"))
        assert verify(tmp_path) == []
        make_ready(ledger, "g1.0", index=1)
        await ledger.commit()
        with reading(tmp_path) as connection:
            assert connection.execute("SELECT count(*) FROM trajectory").fetchone() == (2,)
    seal_run(tmp_path)
    assert verify(tmp_path) == []


async def test_a_reader_rolls_back_what_a_killed_writer_had_begun(tmp_path, network):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        await ledger.commit()
        path = tmp_path / LEDGER_NAME
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("PRAGMA cache_size = 1")
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("CREATE TABLE large (data BLOB)")
        writer.executemany("INSERT INTO large VALUES (?)", [(bytes(5000),)] * 50)
        killed = tmp_path / "killed"
        killed.mkdir()
        for end in ("", "-journal"):
            shutil.copy(f"{path}{end}", killed)
        writer.execute("ROLLBACK")
        writer.close()
    (killed / SEAL_NAME).touch()  # the writer had just continued a finished run
    assert logs_of(killed / LEDGER_NAME) == [killed / f"{LEDGER_NAME}-journal"]
    with reading(killed) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'large'").fetchone()


def test_a_ledger_that_another_process_holds_is_not_called_damaged(tmp_path, network, monkeypatch):
    monkeypatch.setattr(database, "_SHARED_BUSY_S", 0.01)
    path = tmp_path / LEDGER_NAME
    with closing(open_writer(path)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LedgerError, match="another process holds it; try again"):
            open_writer(path)


@pytest.mark.parametrize(
    ("kind", "found"),
    [("nfs4", True), ("lustre", True), ("fuse.sshfs", True), ("ext4", False), ("fuse.mergerfs", False)],
)
def test_a_folder_is_on_the_file_system_of_its_device(tmp_path, kind, found):
    device = tmp_path.stat().st_dev
    number = f"{device >> 8 & 0xFFF}:{device & 0xFF | device >> 12 & 0xFFF00}"
    mounts = f"{ROOT}\n40 22 {number} / /somewhere rw - {kind} there rw"
    assert on_network(tmp_path, mounts) is found
    assert on_network(tmp_path / "not/yet/there", mounts) is found
    assert on_network(tmp_path, ROOT) is False
