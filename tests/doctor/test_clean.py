"""`laminar clean`: weights of stopped runs are listed and deleted, others stay."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laminar_py.cli import app
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import RunFolder

ABSENT = "not there, deleted or not mounted"


@pytest.fixture
def shm(tmp_path):
    """Shared memory with folders of a run that runs, one that was stopped, one that is gone, and of a stranger."""
    folder = tmp_path / "shm"
    (folder / "laminar-of-no-run").mkdir(parents=True)
    for name in ("running", "stopped", "gone"):
        run = RunFolder(tmp_path / "runs" / name)
        run.path.mkdir(parents=True)
        run.shm(folder).mkdir(parents=True)
        run.note_shm(run.shm(folder))
        run.config.write_text("")
        (run.shm(folder) / "model").write_bytes(bytes(3 << 20))
        if name == "gone":
            shutil.rmtree(run.path)
    return folder


def clean(*arguments):
    done = CliRunner().invoke(app, ["clean", *arguments])
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_what_stopped_runs_keep_is_listed_and_freed(shm, tmp_path):
    running = RunFolder(tmp_path / "runs/running")
    running.lock()
    before = sorted(shm.iterdir())
    lines = clean("--shm", str(shm))
    assert len(lines) == 4
    for name, state in (("gone", ABSENT), ("running", "runs"), ("stopped", "stopped")):
        folder = RunFolder(tmp_path / "runs" / name).shm(shm)
        assert f"{folder}: 3 MiB, {tmp_path / 'runs' / name}: {state}" in lines
    assert sorted(shm.iterdir()) == before, "listing deletes nothing"
    assert sum(line.endswith("; freed") for line in clean("--free", "--shm", str(shm))) == 1
    gone = RunFolder(tmp_path / "runs/gone")
    left = [shm / "laminar-of-no-run", running.shm(shm)]
    assert sorted(shm.iterdir()) == sorted([*left, gone.shm(shm)])
    assert sum(line.endswith("; freed") for line in clean("--gone", "--shm", str(shm))) == 1
    assert sorted(shm.iterdir()) == left
    running.unlock()


def test_a_run_that_is_named_is_freed_alone(shm, tmp_path, monkeypatch):
    other = RunFolder(tmp_path / "runs/other")
    other.path.mkdir()
    other.shm(shm).mkdir()
    other.note_shm(other.shm(shm))
    monkeypatch.chdir(tmp_path)
    (line,) = clean("runs/stopped", "--free", "--shm", str(shm))
    assert line.endswith("stopped: stopped; freed")
    assert other.shm(shm).is_dir()
    assert clean("runs/stopped", "--free", "--shm", str(shm)) == [f"runs/stopped has left nothing in {shm}"]


@pytest.mark.parametrize("mistyped", ["runs/stoped", "stopped", "runs"])
def test_a_run_that_is_none_is_refused_with_those_that_there_are(shm, tmp_path, monkeypatch, mistyped):
    monkeypatch.chdir(tmp_path)
    before = sorted(shm.iterdir())
    done = CliRunner().invoke(app, ["clean", mistyped, "--free", "--shm", str(shm)])
    assert isinstance(done.exception, ConfigError), "which ends with exit code 2"
    told = f"run={mistyped}: no such run, and no weights of it in {shm}; choose from "
    assert str(done.exception).startswith(told)
    assert {str(tmp_path / "runs" / name) for name in ("running", "stopped", "gone")} == set(
        str(done.exception).removeprefix(told).split(", ")
    )
    assert sorted(shm.iterdir()) == before
    empty = CliRunner().invoke(app, ["clean", mistyped, "--shm", str(tmp_path / "runs")])
    assert str(empty.exception).endswith("; no other run has left anything there either")


def test_a_run_on_a_disk_that_is_not_mounted_loses_nothing_by_free(shm, tmp_path):
    run = RunFolder(tmp_path / "runs/stopped")
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()  # the mount point
    assert not any(line.endswith("; freed") for line in clean("--free", "--shm", str(shm)))
    assert run.shm(shm).is_dir()


def test_a_folder_that_a_run_deletes_at_its_end_meanwhile_is_passed_over(shm, monkeypatch):
    found = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, of: [self / "laminar-vanished", *found(self, of)])
    assert len(clean("--shm", str(shm))) == 4


def test_shared_memory_without_runs_is_said_to_be_so(tmp_path):
    assert clean("--shm", str(tmp_path)) == [f"no run has left anything in {tmp_path}"]
