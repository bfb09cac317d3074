"""Wanted settings, as a command leaves them in a run's folder, and the settings that a resume has."""

import errno
from pathlib import Path

from laminar_py.ledger.requests import WANTED, last_settings, take_wanted, write_wanted
from laminar_py.records.events import RunStarted, SettingChanged

BOUND, REPLICAS = "staleness.max_staleness", "rollout.replicas"


def test_the_last_value_of_each_setting_is_taken_once_and_a_damaged_file_is_none(tmp_path):
    assert take_wanted(tmp_path) == []
    write_wanted(tmp_path, [f"{REPLICAS}=6"])
    write_wanted(tmp_path, [f"{BOUND}=2"])
    write_wanted(tmp_path, [f"{REPLICAS}=3"])
    assert (take_wanted(tmp_path), take_wanted(tmp_path)) == ([f"{BOUND}=2", f"{REPLICAS}=3"], [])
    (tmp_path / WANTED).write_bytes(b"\xff")
    assert take_wanted(tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_a_setting_that_is_written_while_another_is_read_is_the_next(tmp_path, monkeypatch):
    write_wanted(tmp_path, [f"{REPLICAS}=6"])
    read_bytes = Path.read_bytes

    def read_late(path):
        written = read_bytes(path)
        monkeypatch.undo()
        write_wanted(tmp_path, [f"{REPLICAS}=3"])
        return written

    monkeypatch.setattr(Path, "read_bytes", read_late)
    assert (take_wanted(tmp_path), take_wanted(tmp_path)) == ([f"{REPLICAS}=6"], [f"{REPLICAS}=3"])


def test_a_network_that_fails_for_a_moment_ends_no_run(tmp_path, monkeypatch):
    write_wanted(tmp_path, [f"{REPLICAS}=6"])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stale)
        assert take_wanted(tmp_path) == []
    assert take_wanted(tmp_path) == [f"{REPLICAS}=6"]


def stale(path, target):
    raise OSError(errno.ESTALE, "Stale file handle")


def set_to(name, value):
    return SettingChanged(step=1, name=name, value=value, by="user")


def started(*overrides):
    return RunStarted(
        incarnation=1,
        host="a",
        pid=1,
        schema=1,
        config_digest="",
        drain=True,
        max_staleness=4,
        overrides=overrides,
    )


def test_a_resume_ends_what_was_recorded_of_a_setting_that_it_names():
    changes = [set_to(BOUND, 2), set_to("buffer.capacity", 900), set_to(BOUND, 3)]
    assert last_settings([started(), *changes]) == {BOUND: 3, "buffer.capacity": 900}
    assert last_settings([*changes, started("staleness.max_staleness=8")]) == {"buffer.capacity": 900}
    assert last_settings([*changes, started("staleness={max_staleness: 8}"), set_to(BOUND, 1)])[BOUND] == 1
    assert last_settings([*changes, started("staleness.control.max=3")])[BOUND] == 3
