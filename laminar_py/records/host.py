"""Services of the host that all rooms use: the clock, files that survive a power cut, text safe for a terminal."""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MAX_FOLDER = 36  # characters: a socket's path has 107 at most, and Ray's sockets add 68 to its folder


class Clock(Protocol):
    """Source of time. The simulator passes a virtual clock, so it runs the same policies as a real run."""

    def now(self) -> float:
        """Monotonic seconds of this host; only differences have a meaning."""
        ...


class SystemClock:
    """Clock of a real run."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()


def write_file(path: Path, data: bytes) -> None:
    """Write a file and wait until its bytes are on disk. Its name is on disk after `sync` of its folder."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on disk and so survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def socket_folder() -> str:
    """Return a folder for Unix sockets: the folder for temporary files, or /tmp if its path is too long."""
    return folder if len(folder := tempfile.gettempdir()) <= MAX_FOLDER else "/tmp"


def visible(text: str, *, keep: str = "") -> str:
    r"""Replace characters that do not print by escapes, e.g. `\x1b` or `\u202e`, except characters in `keep`.

    This makes text of models, data and programs safe for a terminal or a page. It replaces control characters,
    overrides of direction, lone surrogates, and every space other than the plain one.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, e.g. "1 replica", "2 replicas" or "1,024 trajectories"."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A row of `laminar doctor`, e.g. `Finding("GPU", "none", good=True)`.

    Packages add rows by functions under the entry point `laminar_py.findings`; each returns a `Finding`.
    """

    subject: str
    state: str
    good: bool
    remedy: str = ""  # shown unless `good`
