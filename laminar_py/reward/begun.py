"""File in which a scoring process says which response it scores, and where it hangs in that one.

The process writes it; the controller reads it when the process has died or has been ended. Invariant: the file
names a response before the reward function sees that, and no longer than it is scored. The place is written by a
thread of C, which also runs where the reward holds the interpreter.
"""

import faulthandler
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laminar_py.records.scoring import Begun

LATE_S = 1.0  # beyond its limit, after which a response hangs
WORKER = str(Path(__file__).with_name("worker.py"))
FRAME = re.compile(r'File "(.+)", line (\d+) in ')


class BegunFile:
    """Writer of the file, one for a process; a response hangs `LATE_S` after its limit of `timeout_s`."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        self._file = path.open("wb", buffering=0)
        self._hung_s = timeout_s + LATE_S

    @contextmanager
    def begin(self, trajectory_id: str) -> Iterator[None]:
        """Name a response while it is scored."""
        self._clear()
        self._file.write(f"{trajectory_id}\n".encode())
        faulthandler.dump_traceback_later(self._hung_s, file=self._file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._clear()

    def _clear(self) -> None:
        self._file.seek(0)
        self._file.truncate()


def begun_path(run: Path, index: int) -> Path:
    """Path of the file of scorer `index` in the folder of a run."""
    return run / "logs" / f"scorer-{index}.begun"


def read_begun(path: Path) -> Begun | None:
    """Response that the process which wrote the file had in hand; None where it had none."""
    try:
        name, _, stacks = path.read_text(errors="replace").partition("\n")
    except FileNotFoundError:
        return None
    return Begun(name, _place(stacks), hung=bool(stacks)) if name else None


def _place(stacks: str) -> str:
    """The line of the user's own code in which the worker's thread is, e.g. " (at rewards.py:7)", or ""."""
    for stack in stacks.split("(most recent call first):"):
        frames: list[tuple[str, str]] = FRAME.findall(stack)
        files = [file for file, _ in frames]
        theirs = frames[: files.index(WORKER)] if WORKER in files else []
        if theirs:
            own = theirs[-1][0]  # the file of what the worker calls
            return next(f" (at {file}:{number})" for file, number in theirs if file == own)
    return ""
