"""Ctrl-C at any time, and again and again: one line, no traceback, and nothing is left running."""

import fcntl
import os
import pty
import re
import signal
import subprocess
import termios
import time
from contextlib import suppress

import pytest

from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import read_events
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import RunEnded
from laminar_py.runtime.cluster.forked import SHARED
from laminar_py.runtime.orchestrator.checkpoints import find_checkpoint
from tests.runs.runs import ALONE, LAMINAR, PATIENCE_S, REPO, TrainProcess, wait_until_gone
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


SLOW_DISK = """
import os, time

fsync = os.fsync


def slowly(file):
    \"\"\"Waits where a checkpoint after the first is synced.\"\"\"
    path = os.readlink(f"/proc/self/fd/{file}")
    if "/checkpoints/step-" in path and "/checkpoints/step-0-" not in path:
        time.sleep(2)
    fsync(file)


os.fsync = slowly
"""


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("laminar_py.cli.command", "laminar: stopped"),
        ("laminar_py.runtime.orchestrator.launch", "laminar: stopped"),
    ],
    ids=["of-the-command-line", "of-the-run"],
)
def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path, module, line):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    done = subprocess.run(
        [LAMINAR, "train", "configs/quickstart.yaml", f"runs={tmp_path}"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}", "INTERRUPTED_AT": module},
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
        output = train.end_with(130)
    assert "was stopped at once" not in output
    assert list(train.run.glob("checkpoints/*"))


SLOW_START = ("warm_start.steps=600",)  # a resume cannot change it
QUICK = ("steps=3", "eval.sets.heldout.samples=1")
HELDOUT = REPO / "tests/runs/heldout.jsonl"
SLOW_EVALUATION = ("rollout.max_batch=4", f"eval.sets.heldout={{path: {HELDOUT}, samples: 2000, temperature: 1}}")
LATE_EVALUATION = ("rollout.max_batch=4", f"eval.sets.heldout={{path: {HELDOUT}, samples: 200, temperature: 1}}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reached"),
    [
        (SLOW_START, "ledger.sqlite"),
        (SLOW_START, "logs/replica-0.log"),
        (SLOW_EVALUATION, "checkpoints/step-0-*"),
        (("steps=1000000", "schedule=sync"), "checkpoints/step-2-*"),
        (("steps=1", *LATE_EVALUATION), "checkpoints/step-1-*"),
    ],
    ids=["start", "warm-start", "first-evaluation", "rl", "last-evaluation"],
)
def test_each_phase_of_a_run_ends_at_a_signal_and_the_run_resumes(tmp_path, settings, reached):
    with TrainProcess(tmp_path, *settings, *ALONE) as train:
        train.wait_until(lambda: list(train.run.glob(reached)))
        train.send(signal.SIGHUP)
        output = train.end_with(130)
    assert "stopping: waiting for " in output
    assert "; resume with: " in output
    assert verify(train.run) == []
    warm_start = settings if settings == SLOW_START else ()
    with TrainProcess(tmp_path, *QUICK, *warm_start, *ALONE, resume=True) as train:
        train.end_with(0)
    assert verify(train.run) == []


@pytest.mark.slow
def test_a_run_that_a_signal_ends_between_its_folder_and_its_record_resumes(tmp_path):
    with TrainProcess(tmp_path, *QUICK, *ALONE) as train:
        train.wait_until(lambda: list(train.run.glob("lock")))
        train.send(signal.SIGTERM)
        output = train.end_with(130)
    assert output.endswith("laminar: stopped\n") or "; resume with: " in output
    with TrainProcess(tmp_path, *QUICK, *ALONE, resume=True) as train:
        train.end_with(0)
    assert verify(train.run) == []


@pytest.mark.slow
@pytest.mark.parametrize("reached", ["logs/replica-0.log", "metrics.jsonl"], ids=["start", "rl"])
def test_a_run_stops_in_order_after_ctrl_c_has_ended_the_reader_of_its_output(tmp_path, reached):
    """Ctrl-C reaches `laminar train | tee log` and tee, so each later line goes into a broken pipe."""
    with TrainProcess(tmp_path, "steps=1000000", *ALONE) as train:
        train.wait_until(lambda: list(train.run.glob(reached)))
        train.process.stdout.close()
        train.send(signal.SIGINT)
        assert train.process.wait(PATIENCE_S) == 130
    with reading(RunFolder(train.run).ledger) as record:
        assert list(read_events(record, RunEnded)) == [RunEnded(1, "interrupted")]
    assert verify(train.run) == []


@pytest.mark.slow
def test_ctrl_c_in_a_checkpoint_waits_for_it_and_the_run_resumes_from_it(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{REPO}")
    monkeypatch.delenv(SHARED)  # its own fork server, whose processes see the slow disk
    with TrainProcess(tmp_path, "steps=1000000", "learner.checkpoint_every=2", *ALONE) as train:
        train.wait_until(lambda: list(train.run.glob("checkpoints/step-2-*.tmp")))
        train.send(signal.SIGINT)
        output = train.end_with(130)
    (step,) = re.findall(r"waiting for the checkpoint of step (\d+); a second signal ends at once", output)[-1:]
    assert f"stopped at step {step}; resume with: " in output
    assert find_checkpoint(RunFolder(train.run)).step == int(step)
    assert verify(train.run) == []


@pytest.mark.slow
def test_a_second_signal_ends_a_run_that_waits_for_a_hanging_learner_and_its_record_stands(tmp_path):
    with TrainProcess(tmp_path, "steps=1000000", *ALONE) as train:
        train.wait_for_step(3)
        learner = next(process for process in train.family() if process.name().startswith("learner"))
        learner.suspend()
        steps = len(train.run.joinpath("metrics.jsonl").read_bytes().splitlines())
        family = train.family()
        train.send(signal.SIGTERM)
        time.sleep(1.5)
        train.send(signal.SIGTERM)
        code, output = train.finish()
        assert wait_until_gone(family) == []
    assert code == 1, output
    assert output.splitlines()[-1] == f"laminar: {train.run} was stopped at once; continue with --resume"
    assert len(train.run.joinpath("metrics.jsonl").read_bytes().splitlines()) >= steps
    assert verify(train.run) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hangup", "steps", "code", "end"),
    [(signal.SIG_DFL, 1000000, 130, "interrupted"), (signal.SIG_IGN, 4, 0, "finished")],
    ids=["stops", "of-nohup"],
)
def test_a_closed_terminal_stops_a_run_with_a_checkpoint_and_one_of_nohup_ends_well(
    tmp_path, hangup, steps, code, end
):
    command = [LAMINAR, "train", str(CONFIG), *SETTINGS, *ALONE, "repack.planner=none", f"steps={steps}"]

    def take_terminal():
        signal.signal(signal.SIGHUP, hangup)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    ours, terminal = pty.openpty()
    run = tmp_path / "small-1"
    train = subprocess.Popen(
        [*command, "name=small", f"runs={tmp_path}"],
        cwd=REPO,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(terminal)
    with suppress(OSError), open(ours, "rb", buffering=0) as screen:
        while not (run / "metrics.jsonl").is_file():
            screen.read(1 << 16)
    assert train.wait(PATIENCE_S) == code
    with reading(RunFolder(run).ledger) as record:
        assert list(read_events(record, RunEnded)) == [RunEnded(1, end)]


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
    assert told <= {f"laminar: {train.run} was stopped at once; continue with --resume"}
    assert code in ((1,) if told else (130, -signal.SIGINT)), "within a second all signals count as one"
    assert verify(train.run) == []
