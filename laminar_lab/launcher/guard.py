"""Stops a run when its launcher is killed: `python -m laminar_lab.launcher.guard PARENT COMMAND...`.

The launcher starts each run through this module. When the launcher is killed, the kernel sends SIGTERM to the run,
and the run stops with a checkpoint.
"""

import os
import signal
import sys

from laminar_py.children import kernel


def main() -> None:
    """Replace this process by the command, after asking the kernel for SIGTERM when `PARENT` ends."""
    parent, *command = sys.argv[1:]
    kernel.end_with_parent(signal.SIGTERM, parent=int(parent))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
