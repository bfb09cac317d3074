"""Results of experiments that are kept, and the bound on what is measured for them."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from laminar_lab.bench import runs
from laminar_lab.bench.runs import KeptResults, call


class Measurement:
    """Counts how often it is made."""

    def __init__(self):
        self.times = 0

    def __call__(self):
        self.times += 1
        return float(self.times)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("lr: 1")
    return path


def test_a_second_start_measures_only_what_is_missing(tmp_path, source):
    first, second = Measurement(), Measurement()
    assert KeptResults(tmp_path, sources=[source], settings="").get("seed-0", float, first) == 1.0
    again = KeptResults(tmp_path, sources=[source], settings="")
    assert again.get("seed-0", float, first) == 1.0
    again.get("seed-1", float, second)
    assert (first.times, second.times) == (1, 1)


def test_other_settings_or_another_source_are_measured_anew(tmp_path, source):
    measure = Measurement()
    KeptResults(tmp_path, sources=[source], settings="").get("seed-0", float, measure)
    assert KeptResults(tmp_path, sources=[source], settings="120 steps").get("seed-0", float, measure) == 2.0
    source.write_text("lr: 2")
    assert KeptResults(tmp_path, sources=[source], settings="").get("seed-0", float, measure) == 3.0


@pytest.mark.parametrize("package", ["laminar_py", "laminar_lab", "laminar_contrib"])
def test_another_source_of_a_package_is_measured_anew(tmp_path, source, monkeypatch, package):
    monkeypatch.setattr(runs, "PROJECT", tmp_path)
    for name in runs.PACKAGES:
        (tmp_path / name).mkdir()
    measure = Measurement()
    KeptResults(tmp_path, sources=[source], settings="").get("seed-0", float, measure)
    (tmp_path / package / "module.py").write_text("SPEED = 2\n")
    assert KeptResults(tmp_path, sources=[source], settings="").get("seed-0", float, measure) == 2.0


def test_a_measurement_that_fails_is_not_kept(tmp_path, source):
    def fail():
        raise subprocess.CalledProcessError(1, "train")

    kept = KeptResults(tmp_path, sources=[source], settings="")
    with pytest.raises(subprocess.CalledProcessError):
        kept.get("seed-0", float, fail)
    assert kept.get("seed-0", float, Measurement()) == 1.0


def test_a_command_beyond_its_limit_is_ended(tmp_path):
    ended = tmp_path / "ended"
    begun = tmp_path / "begun"
    code = (
        "import pathlib, signal, sys, time\n"
        f"def end(*_): pathlib.Path({str(ended)!r}).touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "time.sleep(600)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        call([sys.executable, "-c", code], limit_s=5.0)
    assert ended.exists() or not begun.exists()


def test_a_command_that_fails_is_told():
    with pytest.raises(subprocess.CalledProcessError):
        call([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_run_whose_folder_was_deleted_is_made_again(tmp_path, source, monkeypatch):
    monkeypatch.setattr(runs, "read_run", lambda folder: folder)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    kept = KeptResults(tmp_path / "out", sources=[source], settings="")
    for folder, deletes in ((folders[0], False), (folders[0], True), (folders[1], False)):
        assert kept.run("seed-0", lambda: SimpleNamespace(folder=next(f for f in folders if f.is_dir()))) == folder
        if deletes:
            folder.rmdir()
