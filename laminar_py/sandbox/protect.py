"""A folder that this process, and all that it starts, may not write to any more, whatever its user may.

Used where a user's own code runs that has no business in the record of a run, nor in the memory and environment of
the processes that keep it.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from laminar_py.sandbox.inside import kernel, landlock

KERNEL = (Path("/proc"), Path("/sys"))  # settings there reach beyond every fence
KEPT_CAPABILITIES = 0b10  # of root: to read and write whatever the modes of files say, CAP_DAC_OVERRIDE


def forbid_writes(folder: Path) -> bool:
    """Forbid to write below a folder and in /proc and /sys, and to make or remove anything in folders above it.

    Processes outside cannot be looked into any more either: of root all capabilities are dropped that would allow
    it. False where the kernel has no Landlock, so that only those are dropped.
    """
    if sys.platform != "linux":
        return False
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    fenced = bool(landlock.version())
    if fenced:
        fence = landlock.writes_ruleset([(str(path), landlock.WRITES) for path in _beside(folder.resolve())])
        try:
            landlock.restrict(fence)
        finally:
            os.close(fence)
    kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)
    kernel.keep_capabilities(kernel.held_capabilities() & KEPT_CAPABILITIES)
    return fenced


def _beside(folder: Path) -> Iterator[Path]:
    """Whatever lies beside a folder, and beside each of those above it."""
    for above in folder.parents:
        inner = folder.relative_to(above).parts[0]
        with os.scandir(above) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.name != inner and not entry.is_symlink() and path not in KERNEL:
                    yield path
