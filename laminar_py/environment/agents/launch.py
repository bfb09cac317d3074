"""First module of an agent's process: it ends with the one that started it, and becomes the agent.

`python -m laminar_py.environment.agents.launch '["python", "agent.py"]'`; a command of `path.py:function` alone
calls that function, without arguments, in this process.
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

from laminar_py.sandbox.inside import kernel


def main() -> None:
    """Become the agent."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    command = json.loads(sys.argv[1])
    path, colon, name = command[0].rpartition(":")
    if len(command) > 1 or not colon:
        os.execvp(command[0], command)
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="agent")[name]()


if __name__ == "__main__":
    main()
