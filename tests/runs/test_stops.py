"""Ctrl-C at any time, and again and again: one line, no traceback, and nothing is left running."""

import os
import signal
import subprocess
import time

import pytest

from laminar_lab.audit.verify import verify
from tests.runs.runs import ALONE, LAMINAR, PATIENCE_S, REPO, TrainProcess, forget_versions, wait_until_gone
from tests.runs.test_emulated_run import CONFIG, SETTINGS

INTERRUPT = """
import os, signal, sys


class Interrupter:
    \"\"\"Sends this process Ctrl-C as it looks for a module.\"\"\"

    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupter())
"""


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("laminar_py.cli.main", "laminar: stopped before it began"),
        ("laminar_py.runtime.orchestrator.launch", "laminar: stopped"),
    ],
    ids=["of-the-command-line", "of-the-run"],
)
def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path, module, line):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    done = subprocess.run(
        [LAMINAR, "train", "configs/quickstart.yaml", f"runs={tmp_path}"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "INTERRUPTED_AT": module},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()) == (130, [line])


@pytest.mark.parametrize("others", [[signal.SIGINT], [signal.SIGTERM] * 3], ids=["and-ctrl-c", "again-and-again"])
def test_signals_that_one_end_brings_are_one_request(tmp_path, others):
    """The end of a Ray job reaches a run by itself and by its launcher, whose death the kernel may tell twice."""
    with TrainProcess(tmp_path, *SETTINGS, *ALONE, "repack.planner=none", "steps=10000", config=CONFIG) as train:
        train.wait_for_step(1)
        train.send(signal.SIGTERM)
        for number in others:
            train.send(number)
            time.sleep(0.005)
        code, output = train.finish()
    assert code == 130, output
    assert "at once" not in output
    assert list(train.run.glob("checkpoints/*"))
    forget_versions(train.run)


def test_ctrl_c_again_and_again_is_one_line_and_leaves_nothing_running(tmp_path):
    with TrainProcess(tmp_path, *SETTINGS, *ALONE, "repack.planner=none", "steps=10000", config=CONFIG) as train:
        train.wait_for_step(1)
        family = train.family()
        deadline = time.monotonic() + PATIENCE_S
        while train.process.poll() is None:
            assert time.monotonic() < deadline
            train.send(signal.SIGINT)
            time.sleep(0.02)
        code, output = train.finish()
        assert wait_until_gone(family) == []
    assert "Traceback" not in output
    told = {line for line in output.splitlines() if line.startswith("laminar:")}
    assert told
    assert told == {f"laminar: {train.run} was stopped at once; continue with --resume"}
    assert code == 1
    assert verify(train.run) == []
    forget_versions(train.run)
