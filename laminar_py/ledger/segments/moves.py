"""Addresses of stores whose port was taken when they came back, left in the run's folder, which all hosts see.

A store that gets another port notes it under its old address; a reader that finds nobody there looks, and asks at
the new one. So what was sent out with the old address, an assignment of minutes ago, say, loses nothing.
Invariant: no note leads away from an address at which a store of this incarnation serves.
"""

import shutil
from pathlib import Path

from laminar_py.records.disk import write_file

NAME = "stores"  # folder of the notes in that of the run
_MOST = 16  # notes that a reader follows, one after the other


def note_move(folder: Path, *, before: str | None, address: str) -> None:
    """Note that the store of address `before` serves at `address`. Raises `OSError`."""
    (folder / address).unlink(missing_ok=True)
    if before is not None and before != address:
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = folder / f"{before}.tmp"
        write_file(unfinished, address.encode())
        unfinished.replace(folder / before)


def present_address(folder: Path, address: str) -> str:
    """Address at which the store of an address serves now, as far as anybody noted."""
    for _ in range(_MOST):
        try:
            address = (folder / address).read_text()
        except OSError:
            break
    return address


def forget_moves(folder: Path) -> None:
    """Delete notes of an incarnation before, whose stores have ended."""
    shutil.rmtree(folder, ignore_errors=True)
