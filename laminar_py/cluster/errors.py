"""Ways in which a part and a run end before their time. The command line tells a run's in one line."""

from pathlib import Path


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


def tell_unexpected(error: BaseException, traceback: Path) -> str:
    """Sentence on an error that is neither the user's fault nor a known end of a run."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return f"unexpected, so probably a bug of laminar's: {words}; the traceback is in {traceback}"
