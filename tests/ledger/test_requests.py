"""Wanted settings, as a command leaves them in a run's folder, and the settings that a resume has."""

import errno
import os
from pathlib import Path

from laminar_py.ledger.requests import (
    WANTED,
    changed_by_hand,
    discard_old,
    forget_wanted,
    last_settings,
    take_wanted,
    write_wanted,
)
from laminar_py.ledger.run_folder import LOCK
from laminar_py.records.events import SettingChanged
from tests.events import run_started

BOUND, REPLICAS = "staleness.max_staleness", "rollout.replicas"


def test_the_last_value_of_each_setting_is_taken_until_it_is_forgotten_and_a_damaged_file_is_none(tmp_path):
    assert take_wanted(tmp_path, 0) == []
    write_wanted(tmp_path, [f"{REPLICAS}=6"])
    write_wanted(tmp_path, [f"{BOUND}=2", "learner.publish_every=2"])
    write_wanted(tmp_path, [f"{REPLICAS}=3", "learner.publish_every=3"])
    wanted = [[f"{BOUND}=2"], [f"{REPLICAS}=3", "learner.publish_every=3"]]
    assert (take_wanted(tmp_path, 0), take_wanted(tmp_path, 0), take_wanted(tmp_path, 1)) == (wanted, wanted, [])
    forget_wanted(tmp_path, 0)
    (tmp_path / WANTED).write_bytes(b"\xff")
    assert take_wanted(tmp_path, 1) == []
    assert not list(tmp_path.iterdir())


def test_requests_from_before_a_controller_had_the_lock_are_discarded(tmp_path):
    write_wanted(tmp_path, [f"{REPLICAS}=6"])
    take_wanted(tmp_path, 0)
    write_wanted(tmp_path, [f"{BOUND}=2"])
    lock = tmp_path / LOCK
    lock.touch()
    os.utime(lock, ns=(0, (tmp_path / WANTED).stat().st_mtime_ns + 1))
    assert sorted(discard_old(tmp_path)) == [f"{REPLICAS}=6", f"{BOUND}=2"]
    assert list(tmp_path.iterdir()) == [lock]
    os.utime(lock, ns=(0, 0))
    write_wanted(tmp_path, [f"{BOUND}=3"])
    assert discard_old(tmp_path) == []
    assert take_wanted(tmp_path, 0) == [[f"{BOUND}=3"]]


def test_a_new_request_does_not_revive_those_of_a_dead_controller(tmp_path):
    write_wanted(tmp_path, [f"{REPLICAS}=6"])
    lock = tmp_path / LOCK
    lock.touch()
    os.utime(lock, ns=(0, (tmp_path / WANTED).stat().st_mtime_ns + 1))
    write_wanted(tmp_path, [f"{BOUND}=2"])
    assert take_wanted(tmp_path, 0) == [[f"{BOUND}=2"]]


def test_a_setting_that_is_written_while_another_is_read_is_the_next(tmp_path, monkeypatch):
    write_wanted(tmp_path, [f"{REPLICAS}=6"])
    read_bytes = Path.read_bytes

    def read_late(path):
        written = read_bytes(path)
        monkeypatch.undo()
        write_wanted(tmp_path, [f"{REPLICAS}=3"])
        return written

    monkeypatch.setattr(Path, "read_bytes", read_late)
    assert (take_wanted(tmp_path, 0), take_wanted(tmp_path, 1)) == ([[f"{REPLICAS}=6"]], [[f"{REPLICAS}=3"]])


def test_a_network_that_fails_for_a_moment_ends_no_run(tmp_path, monkeypatch):
    write_wanted(tmp_path, [f"{REPLICAS}=6"])
    for method in ("replace", "read_bytes"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, stale)
            assert take_wanted(tmp_path, 0) == []
    assert take_wanted(tmp_path, 0) == [[f"{REPLICAS}=6"]]


def stale(path, *target):
    raise OSError(errno.ESTALE, "Stale file handle")


def set_to(name, value, by="user"):
    return SettingChanged(step=1, name=name, value=value, by=by)


def started(*overrides):
    return run_started(host="a", schema=1, config_digest="", drain=True, max_staleness=4, overrides=overrides)


def test_a_setting_has_the_value_of_the_last_resume_that_names_it_also_if_that_never_started():
    changes = [set_to(BOUND, 2), set_to("buffer.capacity", 900), set_to(BOUND, 3)]
    assert last_settings([started(), *changes]) == {BOUND: 3, "buffer.capacity": 900}
    named = started("staleness.max_staleness=8", "learner.lr=1e-3", "rollout.replicas=3")
    assert last_settings([*changes, named]) == {BOUND: 8, "buffer.capacity": 900}
    assert last_settings([*changes, started("staleness={max_staleness: 8}")])[BOUND] == 8
    assert last_settings([*changes, started("buffer={}")]) == {BOUND: 3}
    assert last_settings([*changes, started("buffer.capacity=null")]) == {BOUND: 3, "buffer.capacity": None}
    assert last_settings([*changes, started("staleness={max_staleness: 8}"), set_to(BOUND, 1)])[BOUND] == 1
    assert last_settings([*changes, started("staleness.control.max=3")])[BOUND] == 3


def test_a_setting_is_held_from_the_users_change_until_a_resume_names_it():
    changes = [set_to("buffer.capacity", 900), set_to(BOUND, 2, by="control")]
    assert changed_by_hand(changes) == {"buffer.capacity": 900}
    assert changed_by_hand([*changes, set_to(BOUND, 3), started("learner.lr=1")])[BOUND] == 3
    assert changed_by_hand([set_to(BOUND, 3), started("staleness.max_staleness=3"), *changes[1:]]) == {}
