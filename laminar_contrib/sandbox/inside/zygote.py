"""The zygote: a warm interpreter that forks a child for each program, which puts on the fences.

A slot starts it with a socket to the owner. It never reads data of a program, so no run sees another run's data.
It ends when its owner ends. Its states, by commands of the owner:

    setting up -> idle -> (a command) running -> idle     a program ends, is ended at its wall time, or cancelled
    running -> (pause) stopped -> (pause) running         a session, between two calls
"""

import contextlib
import fcntl
import gc
import importlib
import math
import os
import select
import signal
import socket
import time
from typing import NoReturn

from laminar_contrib.sandbox.inside import program
from laminar_contrib.sandbox.inside.fences import NUM_DESCRIPTORS, Fences
from laminar_contrib.sandbox.inside.home import Home
from laminar_contrib.sandbox.inside.messages import (
    SlotCommand,
    SlotNews,
    SlotPause,
    news_frame,
    read_command,
    read_setup,
)
from laminar_py.children import own_control, receive_call

PRELOADED = (  # modules that short programs import; each further module makes every fork slower
    "abc array ast base64 bisect calendar cmath collections.abc contextlib copy csv dataclasses datetime decimal"
    " enum fractions functools hashlib heapq inspect io itertools json linecache math numbers operator os pprint"
    " queue random re shutil statistics string struct subprocess tempfile textwrap threading time traceback types"
    " typing unittest zlib"
)
LOOK_S = 0.05  # between two measurements of a program's folder
STREAMS = 5  # descriptors of a run: payload, input, output, errors, report; a session has its calls as sixth


class OwnerGoneError(Exception):
    """The owner has closed its end of the socket, or has crashed."""


class Zygote:
    """The loop of a zygote, which runs one program at a time."""

    def __init__(self, control: socket.socket, *, owner: int, fences: Fences, home: Home) -> None:
        self._control = control
        self._owner = owner
        self._fences = fences
        self._home = home
        self._woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda number, place: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._poll = select.poll()
        for descriptor in (control.fileno(), self._woken, owner):
            self._poll.register(descriptor, select.POLLIN)

    def serve(self, number: int) -> None:
        """Answer the call `number` by `ready`, and run programs until the owner closes the socket or ends."""
        program.complete_python()
        program.hide_own_modules()
        gc.collect()
        gc.freeze()
        self._fences.measure_address_space()
        self._answer(number, SlotNews(kind="ready"))
        with contextlib.suppress(OwnerGoneError):
            while True:
                if self._wait(None):
                    number, command, descriptors = self._receive()
                    if isinstance(command, SlotCommand):  # else its program has ended before
                        self._run(number, command, descriptors)
                    elif command is not None:
                        self._answer(number, SlotNews(kind="paused"))

    def _run(self, number: int, command: SlotCommand, descriptors: list[int]) -> None:
        """Fork a program, wait for its end within its limits, kill it, and report the outcome.

        The home folder is reset before and after the run.
        """
        self._reset_home()
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            self._run_program(command, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            ended = self._await_end(child, command, start + command.limits.wall_s)
        finally:
            elapsed_s = time.monotonic() - start
            os.kill(child, signal.SIGKILL)  # it is not reaped yet, so the id is its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # for processes that a program without walls has started
            _, status, used = os.wait4(child, 0)
        if not ended and self._home.is_full(command.limits.file_bytes):  # measured again: nothing hides files now
            ended = "folder"
        cpu_s = used.ru_utime + used.ru_stime
        self._answer(number, SlotNews(kind="end", status=status, ended=ended, cpu_s=cpu_s, elapsed_s=elapsed_s))
        self._reset_home()

    def _reset_home(self) -> None:
        if self._home.reset():
            self._fences.allow_home(self._home.path)

    def _await_end(self, child: int, command: SlotCommand, deadline: float) -> str:
        """Wait until a child ends, or until there is a reason to end it. Returns the reason, or ""."""
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            left = LOOK_S if command.session else deadline - time.monotonic()
            if left <= 0:
                return "wall"
            if self._wait(min(left, LOOK_S)):
                number, command_now, _ = self._receive()
                if not isinstance(command_now, SlotPause):  # a cancellation
                    return "asked"
                os.kill(child, signal.SIGSTOP if command_now.paused else signal.SIGCONT)
                self._answer(number, SlotNews(kind="paused"))
            if self._fences.has_too_many_threads(child):
                return "threads"
            if self._home.is_full(command.limits.file_bytes):
                return "folder"
        return ""

    def _wait(self, seconds: float | None) -> bool:
        """Wait for a command, for the end of a child, or for `seconds`. Returns True if a command has arrived.

        Raises `OwnerGoneError`.
        """
        ready = dict(self._poll.poll(None if seconds is None else max(0.0, seconds) * 1000 + 1))
        if self._owner in ready:
            raise OwnerGoneError
        if self._woken in ready:
            os.read(self._woken, 4096)
        return self._control.fileno() in ready

    def _receive(self) -> tuple[int, SlotCommand | SlotPause | None, list[int]]:
        """Receive the next call; it has no command if it cancels the run. Raises `OwnerGoneError`."""
        call = receive_call(self._control)
        if call is None:
            raise OwnerGoneError
        number, body, descriptors = call
        return number, read_command(body) if body else None, descriptors

    def _answer(self, number: int, news: SlotNews) -> None:
        self._control.sendall(news_frame(number, news))

    def _run_program(self, command: SlotCommand, descriptors: list[int]) -> NoReturn:
        """Run the program in this forked child, then exit."""
        code = 70
        try:
            signal.set_wakeup_fd(-1)
            payload, files = program.read_payload(descriptors[0])
            os.chdir(self._home.path)
            _replace_environment(self._home.path)
            self._control.detach()
            self._fences.apply(command.limits, session=command.session)
            _move_descriptors(descriptors[1:])
            if command.session:
                calls = socket.socket(fileno=STREAMS - 1)
                code = program.converse(files, calls, cpu_s=math.ceil(command.limits.cpu_s))
            else:
                code = program.run(payload, files, report=STREAMS - 2)
        except BaseException as error:  # noqa: BLE001 - a fence failed; the owner reads it in its first test run
            with contextlib.suppress(OSError):
                os.write(descriptors[3], f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)


def main() -> None:
    """Serve runs in the fences that the owner's first call asks for, until the owner closes the socket or ends.

    If the fences cannot be made, send the reason to the owner and return. Returns at once if no call comes.
    """
    control = own_control()
    owner = os.pidfd_open(os.getppid())
    call = receive_call(control)
    if call is None:
        return
    number, body, _ = call
    setup = read_setup(body)
    home = Home(setup.home)
    try:
        for name in PRELOADED.split():
            importlib.import_module(name)
        zygote = Zygote(control, owner=owner, fences=Fences(walls=setup.walls), home=home)
    except Exception as error:  # noqa: BLE001 - the owner raises it
        fault = SlotNews(kind="fault", detail=f"{error}" or type(error).__name__)
        control.sendall(news_frame(number, fault))
        return
    try:
        zygote.serve(number)
    finally:
        home.remove()


def _move_descriptors(descriptors: list[int]) -> None:
    """Move these descriptors to 0, 1, 2 and so on, and close all others. Children inherit only the first three."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, NUM_DESCRIPTORS // 2) for descriptor in descriptors]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number, inheritable=number <= 2)
    os.closerange(len(high), 4 * NUM_DESCRIPTORS)


def _replace_environment(home: str) -> None:
    os.environ.clear()
    os.environ.update(HOME=home, TMPDIR=home, LANG="C.UTF-8", PATH="/usr/bin:/bin")
