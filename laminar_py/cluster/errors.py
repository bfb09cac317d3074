"""Ways in which a part and a run end before their time. The command line tells a run's in one line."""

from collections.abc import Iterator
from pathlib import Path

from laminar_py.config.section import ConfigError
from laminar_py.records.protocols import RefusedError

MISTAKES = (ValueError, TypeError, AssertionError, AttributeError, LookupError, NameError, ArithmeticError)


class PartDiedError(Exception):
    """A supervised part is gone or of no use any more; the message says why."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part}: {reason}")
        self.part = part
        self.reason = reason


class PartBugError(Exception):
    """A part raised what only a mistake in this package raises; starting it anew would hide that."""


class RunFailedError(Exception):
    """The run cannot go on; the message says why, in one line, and where to look."""


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
