"""A process that ends with the one that started it: `python -m laminar_lab.launcher.guard PARENT COMMAND...`.

Started by the launcher for each run. The kernel sends SIGTERM when the parent dies, however it dies, on which a
run stops with a checkpoint; so no run outlives its launcher, and none is torn by it.
"""

import os
import signal
import sys

from laminar_py.sandbox.inside import kernel


def main() -> None:
    """Become the command."""
    parent, *command = sys.argv[1:]
    kernel.end_with_parent(signal.SIGTERM, parent=int(parent))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
