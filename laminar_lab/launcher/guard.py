"""A process that ends with the one that started it: `python -m laminar_lab.launcher.guard PARENT COMMAND...`.

The launcher starts each run through it. When the launcher dies, the kernel sends SIGTERM to the run, which then
stops with a checkpoint, so no run outlives its launcher.
"""

import os
import signal
import sys

from laminar_py.sandbox import end_with_parent


def main() -> None:
    """Replace this process by the command."""
    parent, *command = sys.argv[1:]
    end_with_parent(signal.SIGTERM, parent=int(parent))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
