"""Errors that end a part or a run, and functions that distinguish them."""

import errno
import re
from collections.abc import Iterator
from pathlib import Path

from laminar_py.config.section import ConfigError
from laminar_py.records.engine import RefusedError

MISTAKES = (ValueError, TypeError, AssertionError, AttributeError, LookupError, NameError, ArithmeticError)

# in messages of torch, Python, libc, SGLang, and Ray's memory monitor
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|OUT_OF_MEMORY|running low on memory|MemoryError|can.?t allocate memory"
    r"|cannot allocate memory|not enough memory",
    re.IGNORECASE,
)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
SQLITE_UNWRITABLE = {8, 10, 13, 14}  # codes of SQLite: READONLY, IOERR, FULL, CANTOPEN

# in the message of any error
UNWRITTEN = re.compile(r"No space left on device|PytorchStreamWriter failed writing")


class PartCrashedError(Exception):
    """A part crashed, or its keeper must replace it; the message names the part and the reason."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part}: {reason}")
        self.part = part
        self.reason = reason


class NoAnswerError(Exception):
    """A process, or its node, gives no answer; the message says why."""


class RemoteCallError(NoAnswerError):
    """A function raised an error on another node; `is_bug`: the error is a mistake in this package."""

    def __init__(self, reason: str, *, is_bug: bool) -> None:
        super().__init__(reason)
        self.is_bug = is_bug


def says_out_of_memory(words: str) -> bool:
    """Return True if an error message says that the memory of the host or of a GPU ran out."""
    return OUT_OF_MEMORY.search(words) is not None


def why_unwritable(error: BaseException) -> str | None:
    """Return the reason if an error means that a disk or folder takes no more data; None for any other error."""
    if isinstance(error, OSError) and error.errno in FULL:
        return str(error)
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in SQLITE_UNWRITABLE:
        return f"the ledger: {error}"
    return " ".join(str(error).split()) if UNWRITTEN.search(str(error)) else None


class PartBugError(Exception):
    """A part raised an error that is a mistake in this package; a restart would hide the mistake."""


class RunFailedError(Exception):
    """The run cannot continue; the message says why, in one line, and where to look."""


class UnwritableError(RunFailedError):
    """A part could not write a file of the run; the message says why."""


def errors_in(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group, at any depth, or the error itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from errors_in(inner)
    else:
        yield error


def bug_in(error: BaseException) -> BaseException | None:
    """Return the first mistake in this package in an error or a group of errors; None if there is none."""
    return next((inner for inner in errors_in(error) if _is_bug(inner)), None)


def _is_bug(error: BaseException) -> bool:
    return isinstance(error, (*MISTAKES, PartBugError)) and not isinstance(error, (ConfigError, RefusedError))


def unexpected_message(error: BaseException, traceback: Path) -> str:
    """Return a line about an error that may be a bug; `traceback` is the file with the traceback."""
    message = str(error) if isinstance(error, PartBugError) else f"{type(error).__name__}: {error}"
    return (
        f"unexpected, so probably a bug of laminar's: {' '.join(message.split())}; the traceback is in {traceback}"
    )
