"""The wanted number of replicas, as a command leaves it in a run's folder."""

import errno
from pathlib import Path

from laminar_py.ledger.scaling import WANTED, take_wanted, write_wanted


def test_the_last_wanted_number_is_taken_once_and_a_damaged_file_is_none(tmp_path):
    assert take_wanted(tmp_path) is None
    write_wanted(tmp_path, 6)
    write_wanted(tmp_path, 3)
    assert (take_wanted(tmp_path), take_wanted(tmp_path)) == (3, None)
    (tmp_path / WANTED).write_text("{")
    assert take_wanted(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_number_that_is_written_while_another_is_read_is_the_next(tmp_path, monkeypatch):
    write_wanted(tmp_path, 6)
    read_bytes = Path.read_bytes

    def read_late(path):
        written = read_bytes(path)
        monkeypatch.undo()
        write_wanted(tmp_path, 3)
        return written

    monkeypatch.setattr(Path, "read_bytes", read_late)
    assert (take_wanted(tmp_path), take_wanted(tmp_path)) == (6, 3)


def test_a_network_that_fails_for_a_moment_ends_no_run(tmp_path, monkeypatch):
    write_wanted(tmp_path, 6)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stale)
        assert take_wanted(tmp_path) is None
    assert take_wanted(tmp_path) == 6


def stale(path, target):
    raise OSError(errno.ESTALE, "Stale file handle")
