"""Ways in which a part and a run end before their time. The command line tells a run's in one line."""

import errno
import re
from collections.abc import Iterator
from pathlib import Path

from laminar_py.config.section import ConfigError
from laminar_py.records.engine import RefusedError

MISTAKES = (ValueError, TypeError, AssertionError, AttributeError, LookupError, NameError, ArithmeticError)

# Ray's own, where its watch over a node's memory ended the process, torch's, Python's, the C library's, SGLang's
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|OUT_OF_MEMORY|running low on memory|MemoryError|can.?t allocate memory"
    r"|cannot allocate memory|not enough memory",
    re.IGNORECASE,
)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
SQLITE_UNWRITABLE = {8, 10, 13, 14}  # codes of SQLite: READONLY, IOERR, FULL, CANTOPEN
UNWRITTEN = re.compile(r"No space left on device|PytorchStreamWriter failed writing")  # wherever it was wrapped


class PartDiedError(Exception):
    """A supervised part is gone or of no use any more; the message says why.

    `vanished` where somebody ended its process, or its engine's, and neither it nor this run says who.
    """

    def __init__(self, part: str, reason: str, *, vanished: bool = False) -> None:
        super().__init__(f"{part}: {reason}")
        self.part = part
        self.reason = reason
        self.vanished = vanished


class ProcessLostError(Exception):
    """A process, or its node, gives no answer; the message says why.

    `ended_by_run` where the run itself ended the process.
    """

    def __init__(self, reason: str, *, ended_by_run: bool = False) -> None:
        super().__init__(reason)
        self.ended_by_run = ended_by_run


class RemoteCallError(ProcessLostError):
    """A function raised on a node; `is_bug` where only a mistake in this package raises that."""

    def __init__(self, reason: str, *, is_bug: bool) -> None:
        super().__init__(reason)
        self.is_bug = is_bug


def for_memory(words: str) -> bool:
    """True where what a part said last is that memory ran out, of the host or of a GPU."""
    return OUT_OF_MEMORY.search(words) is not None


def unwritable(error: BaseException) -> str | None:
    """Reason why a file could not be written, where that is for its disk or its folder; None for another error."""
    if isinstance(error, OSError) and error.errno in FULL:
        return str(error)
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in SQLITE_UNWRITABLE:
        return f"the ledger: {error}"
    return " ".join(str(error).split()) if UNWRITTEN.search(str(error)) else None


class PartBugError(Exception):
    """A part raised what only a mistake in this package raises; starting it anew would hide that."""


class RunFailedError(Exception):
    """The run cannot go on; the message says why, in one line, and where to look."""


class UnwritableError(RunFailedError):
    """A part could not write a file of the run; the message says why."""


def errors_in(error: BaseException) -> Iterator[BaseException]:
    """Errors in a group, at any depth; one that is no group is alone."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from errors_in(inner)
    else:
        yield error


def bug_in(error: BaseException) -> BaseException | None:
    """The first mistake of ours in an error or a group of errors, if there is one."""
    return next((inner for inner in errors_in(error) if _is_bug(inner)), None)


def _is_bug(error: BaseException) -> bool:
    return isinstance(error, (*MISTAKES, PartBugError)) and not isinstance(error, (ConfigError, RefusedError))


def tell_unexpected(error: BaseException, traceback: Path) -> str:
    """Sentence on an error that is neither the user's fault nor a known end of a run."""
    told = str(error) if isinstance(error, PartBugError) else f"{type(error).__name__}: {error}"
    return f"unexpected, so probably a bug of laminar's: {' '.join(told.split())}; the traceback is in {traceback}"
