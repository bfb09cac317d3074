"""A run whose folder lies on a file system over a network: killed, resumed, killed, and resumed elsewhere."""

import sys
from contextlib import suppress

import psutil
import pytest

from laminar_lab.audit.queries import accounting
from laminar_lab.audit.verify import prove, verify
from laminar_py.ledger.database import LEDGER_NAME, is_copy, reading
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.local import is_local
from laminar_py.ledger.segments.writer import segments_in
from tests.runs.runs import ALONE, TrainProcess, forget_versions, wait_until_gone

KEEP_ALL = "learner.keep_checkpoints=9"  # and the segments that they need


def start(folder, disk, *settings, resume=False):
    """Its ledger is on that disk of the host that it runs on."""
    disk.mkdir(exist_ok=True)
    network = (sys.executable, "-m", "tests.runs.over_network", str(folder))
    return TrainProcess(folder, f"runs_local={disk}", *ALONE, *settings, resume=resume, laminar=network)


def last_event(ledger):
    with reading(ledger) as connection:
        return connection.execute("SELECT seq, hash FROM head").fetchone()


def has_event(ledger, event):
    with reading(ledger) as connection:
        return connection.execute("SELECT 1 FROM event WHERE seq = ? AND hash = ?", event).fetchone() is not None


def is_ahead(live, copy):
    """True once steps are on record that the copy does not have."""
    return live.is_file() and copy.is_file() and last_event(live)[0] > last_event(copy)[0] + 40


def run_and_kill(folder, disk, **options):
    """The last event that was on record, which no copy in the run's folder has."""
    with start(folder, disk, "steps=10000", "learner.checkpoint_every=4", **options) as train:
        run = RunFolder(train.run)
        live = run.live_folder(disk) / LEDGER_NAME
        train.wait_for_step(5 if not options else 9)
        train.wait_until(lambda: is_ahead(live, run.ledger))
        family = train.family()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, output = train.finish()
        assert wait_until_gone(family) == []
    assert is_copy(run.ledger)
    assert not list(run.path.glob(f"{LEDGER_NAME}-*"))
    assert is_local(run.segments)
    assert run.segments.readlink().parent == disk, "no host writes its tokens over the network"
    assert verify(run.path) == []
    return last_event(live), output


@pytest.fixture
def run(tmp_path):
    yield RunFolder(tmp_path / "net/small-1")
    forget_versions(tmp_path / "net/small-1")


@pytest.mark.slow
def test_over_a_network_a_killed_run_goes_on_from_its_own_disk_or_from_its_last_checkpoint(run, tmp_path):
    folder, here = run.path.parent, tmp_path / "here"
    first, _ = run_and_kill(folder, here)
    second, output = run_and_kill(folder, here, resume=True)
    assert "lost" not in output
    assert has_event(run.live_folder(here) / LEDGER_NAME, first)
    assert has_event(run.path, first), "copied at the start"
    with start(folder, tmp_path / "elsewhere", "steps=14", resume=True) as train:
        code, output = train.finish()
    assert code == 0, output
    (lost,) = [line for line in output.splitlines() if line.startswith(f"{run.ledger}: ")]
    assert lost.endswith("made before it ended; later events are lost")
    assert not has_event(run.path, second)
    assert prove(run.path).violations == []
    assert prove(run.path).notes[0].startswith("sealed: ")
    assert accounting(run.path).balanced
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not is_local(run.segments)
    kept = {path.name for path in segments_in(run.segments)}
    assert kept, "what came after the oldest checkpoint"
    with start(folder, tmp_path / "third", "steps=15", KEEP_ALL, resume=True) as train:
        code, output = train.finish()
    assert code == 0, output
    assert {path.name for path in segments_in(run.segments)} >= kept, "they came along and back again"
    assert prove(run.path).violations == []
    assert accounting(run.path).balanced
    assert list((tmp_path / "third").iterdir()) == []
