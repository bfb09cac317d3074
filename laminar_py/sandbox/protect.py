"""A folder that this process, and all that it starts, may not write to any more, whatever its user may.

Used where a user's own code runs that has no business in the record of a run.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from laminar_py.sandbox.inside import kernel, landlock


def forbid_writes(folder: Path) -> bool:
    """Forbid to write below a folder, and to make or remove anything in the folders above it.

    False where the kernel has no Landlock, so that nothing is forbidden.
    """
    if sys.platform != "linux" or not landlock.version():
        return False
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    fence = landlock.writes_ruleset([(str(path), landlock.WRITES) for path in _beside(folder.resolve())])
    landlock.restrict(fence)
    os.close(fence)
    return True


def _beside(folder: Path) -> Iterator[Path]:
    """Whatever lies beside a folder, and beside each of those above it."""
    for above in folder.parents:
        inner = folder.relative_to(above).parts[0]
        with os.scandir(above) as entries:
            for entry in entries:
                if entry.name != inner and not entry.is_symlink():
                    yield Path(entry.path)
