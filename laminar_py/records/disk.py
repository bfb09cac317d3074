"""Files and names that survive a power cut: written to disk before anything else is built on them."""

import os
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Return when it is on disk; its name is once its folder is synced, too."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Return when a file is on disk, or the names in a folder: only then do they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
