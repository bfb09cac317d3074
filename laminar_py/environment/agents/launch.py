"""First module of an agent's process: it ends with the one that started it, and becomes the agent.

`python -m laminar_py.environment.agents.launch '[4711, ["python", "agent.py"]]'`, with that one's id; a command of
`path.py:function` alone calls that function, without arguments, in this process.
"""

import json
import os
import resource
import runpy
import signal
import sys
from pathlib import Path

from laminar_py.sandbox.inside import kernel

FILE_BYTES = 2**28  # of each file that an agent writes, its log among them


def main() -> None:
    """Become the agent."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    parent, command = json.loads(sys.argv[1])
    if os.getppid() != parent:
        sys.exit("the process that started it has died")
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    path, colon, name = command[0].rpartition(":")
    if len(command) > 1 or not colon:
        os.execvp(command[0], command)
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="agent")[name]()


if __name__ == "__main__":
    main()
