"""The signals that end a command: Ctrl-C, SIGTERM, and the SIGHUP of a closed terminal.

`laminar` owns them before its imports. The first signal raises KeyboardInterrupt; once a controller leads a run,
`heeded` calls its `interrupt` instead. A second signal, more than `SAME_S` later, ends the process at once. It is
as safe as a power cut: the record is on disk, and the kernel ends all processes of the run.
"""

import atexit
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SAME_S = 1.0  # signals within this time count as one: a launcher may send two at a job's end
SHOW_CURSOR = "\x1b[?25h"
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """How this process ends at a signal; `SIGNALS` is the one instance."""

    def __init__(self) -> None:
        self._owned = self._told = False
        self._awaited: str = ""  # what an end waits for
        self._cost: Callable[[], str] = lambda: ""  # of a second signal
        self._first_s: float | None = None  # when the first signal came
        self._request: Callable[[], object] | None = None
        self._show: Callable[[str], object] = write_line
        self._at_once = ("stopped at once", 130)

    def own(self) -> None:
        """Handle the signals from now on."""
        self._owned = True
        self.enter("its imports")

    def enter(self, awaited: str, cost: Callable[[], str] = lambda: "") -> None:
        """Name what an end waits for from now on, e.g. "step 12"; a command that is ending prints it.

        `cost` returns what a second signal loses, e.g. "42 s of work on step 12 are lost"; "" for nothing.
        Also take the signals back from libraries: an import of Ray takes SIGTERM. nohup's SIGHUP stays ignored.
        """
        if self._owned:
            _leave_closed_outputs()
        is_new, self._awaited, self._cost = awaited != self._awaited, awaited, cost
        for number in NUMBERS if self._owned else ():
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        if self._told and is_new:
            self.tell()

    @contextmanager
    def heeded(
        self, interrupt: Callable[[], object], show: Callable[[str], object], at_once: str
    ) -> Iterator[None]:
        """Let the first signal call `interrupt`; `show` prints lines. A second signal prints `at_once`.

        After the block a first signal changes nothing, since the command ends.
        """
        self._request, self._show, self._at_once = interrupt, show, (at_once, 1)
        try:
            if self._first_s is not None:  # a library has caught the KeyboardInterrupt
                self._request()
            yield
        finally:
            self._request, self._show = lambda: None, write_line

    def tell(self) -> None:
        """Print what the end waits for."""
        self._told = True
        cost = self._cost()
        at_once = f"a second signal ends at once{f': {cost}' if cost else ''}"
        self._show(f"stopping: waiting for {self._awaited}; {at_once}")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread; a timer calls `tell` if nothing else has within `SAME_S`."""
        if number == signal.SIGHUP:
            _leave_closed_outputs()
        if self._first_s is None:
            self._first_s = time.monotonic()
            signal.signal(signal.SIGALRM, lambda number, frame: None if self._told else self.tell())
            signal.setitimer(signal.ITIMER_REAL, SAME_S)
            atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # Python drops the handler as it ends
            if self._request is None:
                raise KeyboardInterrupt
            self._request()
        elif time.monotonic() - self._first_s > SAME_S:
            line, code = self._at_once
            write_line(f"laminar: {line}")
            os._exit(code)


def write_line(line: str) -> None:
    """Write a line to standard error; unlike `print`, it may interrupt another write. Show a hidden cursor."""
    with suppress(OSError):  # the terminal is closed, or Ctrl-C has ended the reader of the pipe
        os.write(2, f"{SHOW_CURSOR if os.isatty(2) else ''}{line}\n".encode())


def _leave_closed_outputs() -> None:
    """Send further output nowhere if its terminal or pipe is closed, since a write would fail and end the run."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)  # reports closed ends alone
    for descriptor, _ in poll.poll(0):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


SIGNALS = Signals()
