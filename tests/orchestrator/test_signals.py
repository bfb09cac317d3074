"""Signals that end a command: what the first one does, which ones count as one, and what the second one does."""

import asyncio
import os
import subprocess
import sys

import pytest

from laminar_py.runtime.orchestrator.trainer import StoppedError, StopRequest

PATIENCE_S = 30.0
OWN = """
import os, signal, sys, time
from laminar_py.runtime.orchestrator.signals import SIGNALS, SAME_S

def send(*names):
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))

class Loop:
    '''An event loop of one call at a time.'''
    def __init__(self):
        self.calls = []
    def post(self, call):
        self.calls.append(call)
    def turn(self):
        while self.calls:
            self.calls.pop(0)()

def ask():
    print("asked")
    SIGNALS.tell()

loop = Loop()
SIGNALS.own()
SIGNALS.enter("the weather")
"""


def run(code):
    """Exit code and all output of a process that owns its signals and executes `code`."""
    done = subprocess.run(
        [sys.executable, "-c", OWN + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


HEEDED = 'with SIGNALS.heeded(lambda: loop.post(ask), print, "runs/x-1 was stopped at once"):\n    '


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_with_nothing_on_record_the_first_signal_interrupts_and_others_at_once_are_the_same(name):
    first = f"try:\n    send('{name}')\nexcept KeyboardInterrupt:\n    print('ended')\n"
    assert run(f"{first}send('{name}', 'SIGTERM')\nprint('once')") == (0, ["ended", "once"])


def test_a_process_that_goes_on_says_what_it_waits_for():
    code = "try:\n    send('SIGTERM')\nexcept KeyboardInterrupt:\n    time.sleep(SAME_S + 0.5)"
    assert run(code) == (0, ["stopping: waiting for the weather; a second signal ends at once"])


def test_the_timer_of_the_line_does_not_kill_a_process_that_ends():
    last = "import atexit; atexit._clear(); atexit.register(time.sleep, SAME_S + 0.2)\n"
    code, lines = run(f"{last}try:\n    send('SIGTERM')\nexcept KeyboardInterrupt:\n    pass")
    assert (code, lines) == (0, [])


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_second_signal_after_a_second_ends_at_once_in_any_phase(second):
    stop = f"time.sleep(SAME_S + 0.1); send('{second}'); print('still here')"
    free = f"try:\n    send('SIGTERM')\nexcept KeyboardInterrupt:\n    {stop}"
    assert run(free)[0] == 130
    code, lines = run(f"{HEEDED}send('SIGTERM'); loop.turn(); {stop}")
    assert code == 1
    assert lines[-1] == "laminar: runs/x-1 was stopped at once"
    assert "still here" not in lines


def test_a_heeded_signal_asks_for_the_end_and_each_phase_says_what_it_waits_for():
    code = "send('SIGHUP'); loop.turn(); SIGNALS.enter('step 12'); SIGNALS.enter('step 12')\nsend('SIGTERM')"
    weather, step = (
        f"stopping: waiting for {what}; a second signal ends at once" for what in ("the weather", "step 12")
    )
    assert run(HEEDED + code) == (0, ["asked", weather, step])
    code = "SIGNALS.enter('step 3', lambda: '42 s of work would be lost'); send('SIGINT'); loop.turn()"
    assert run(HEEDED + code)[1][1:] == [
        "stopping: waiting for step 3; a second signal ends at once: 42 s of work would be lost"
    ]


def test_a_signal_that_a_library_caught_is_heeded_later_and_one_after_the_end_changes_nothing():
    caught = "try:\n    send('SIGINT')\nexcept BaseException:\n    pass\n"
    assert run(f"{caught}{HEEDED}loop.turn()")[1][0] == "asked"
    assert run(f"{HEEDED}pass\nsend('SIGTERM')\nprint('ended as ever')") == (0, ["ended as ever"])


def test_signals_are_taken_back_from_libraries_and_nohup_keeps_its_own():
    taken = "signal.signal(signal.SIGTERM, signal.SIG_DFL); SIGNALS.enter('more')\n"
    assert run(f"{taken}{HEEDED}send('SIGTERM'); loop.turn()")[1][0] == "asked"
    nohup = "signal.signal(signal.SIGHUP, signal.SIG_IGN); SIGNALS.enter('more'); send('SIGHUP'); print('here')"
    assert run(nohup) == (0, ["here"])


NOTICES = """
from rich.console import Console
from laminar_py.observe.live import View
from laminar_py.records.host import SystemClock
view = View(Console(), clock=SystemClock(), steps=1)
view.notice("first"), view.notice("second")
"""


@pytest.mark.parametrize(
    "code", [f"{OWN}print('a', flush=True)", NOTICES], ids=["from-the-next-phase-on", "notices-of-a-run"]
)
def test_output_into_a_pipe_without_a_reader_goes_nowhere_and_ends_nothing(code):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stopped_command_ends_as_such_though_nobody_reads_its_last_line():
    reader, writer = os.pipe()
    os.close(reader)
    code = (
        "import os, signal, sys, types; import laminar_py.cli\n"
        "run = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.modules['laminar_py.cli.command'] = types.SimpleNamespace(run=run)\n"
        "laminar_py.cli.main()"
    )
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run([sys.executable, "-c", code], stderr=pipe, timeout=60, check=False)
    assert done.returncode == 130


def test_the_command_owns_signals_before_it_imports_anything_that_takes_time():
    code = (
        "import sys, signal; from laminar_py.runtime.orchestrator.signals import SIGNALS\n"
        "import laminar_py.cli; own = SIGNALS.own\n"
        "slow = {'typer', 'rich', 'asyncio', 'pydantic'}\n"
        "SIGNALS.own = lambda: (own(), sys.exit(' '.join(slow & set(sys.modules))))\n"
        "laminar_py.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == ""


async def test_work_ends_with_its_result_or_with_the_stop():
    stop = StopRequest()
    assert await stop.unless_asked(asyncio.sleep(0, "done")) == "done"
    ended = asyncio.Event()

    async def work():
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.sleep(0)
            ended.set()

    waiting = asyncio.create_task(stop.unless_asked(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stop.asked.set()
    with pytest.raises(StoppedError):
        await waiting
    assert ended.is_set(), "cancelled work is over before the run ends"
