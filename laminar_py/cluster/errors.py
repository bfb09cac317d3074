"""How a part and how a run ends before its time. Raised all over the room; the command line tells the second."""


class PartDiedError(Exception):
    """A supervised part is gone or of no use any more; the message says why."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part}: {reason}")
        self.part = part
        self.reason = reason


class RunFailedError(Exception):
    """The run cannot go on; the message says why, in one line, and where to look."""
