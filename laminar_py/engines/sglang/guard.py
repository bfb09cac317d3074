"""Ends one server as a whole: when it is told to, when its owner dies, or when the server itself has ended.

`SGLangServer` runs this file as a script. Standard input brings one line, an `Order` as JSON, and stays open; its
end means stop. Invariant: once the guard has ended, nothing that the server started is left, neither in its
process group nor out of it, and nothing of it in shared memory or the folder for temporary files.

    starting --order--> watching --input closed | owner, stand-in or server dead--> ending --no child--> ended

The guard is a grandchild of the owner, since Ray kills the children of a process that ends and would leave it no
time to clean up. The child is a stand-in that waits for it and has its exit code. Both import next to nothing,
since they live as long as the server does.
"""

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from laminar_py.sandbox.inside import kernel

PATIENCE_S = 3.0  # for resource trackers to end by themselves, which takes 0.1 s
LOOK_MS = 1000  # between two looks at a starting server
# SGLang leaves this file behind however it ends; nothing else in shared memory is the server's own
LEFT_BEHIND = re.compile(r"/dev/shm/sglang_loads_\w+\.shm")


@dataclass(frozen=True, slots=True)
class Order:
    """Command to run, e.g. `Order(["python", "-m", "sglang.launch_server"], {"api-key": "..."})`."""

    command: list[str]
    config: dict[str, str]  # flags that no other user of the machine may see; they go through a private file


def main() -> int:
    """Run the server of the order on standard input. Returns its exit code, as a shell would."""
    line = sys.stdin.readline()
    if not line:
        return 1
    order = Order(**json.loads(line))
    stand_in, owner = os.getpid(), os.getppid()
    guard = os.fork()
    if guard:
        return os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    os.setsid()
    with tempfile.TemporaryDirectory(prefix="laminar-sglang-") as scratch:
        return _run(order, Path(scratch), stand_in, owner)


def _run(order: Order, scratch: Path, *reasons: int) -> int:
    """Start the server and end it when one of the processes in `reasons` has died, among the other reasons."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process, so none escapes
    config = scratch / "config.yaml"
    config.write_text(json.dumps(order.config))  # JSON is YAML
    server = subprocess.Popen(
        [*order.command, "--config", str(config)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(scratch)},  # its sockets go with the folder
        preexec_fn=kernel.end_with_parent,  # should the guard be killed itself
    )
    left_behind: set[str] = set()
    try:
        left_behind = _watch(*reasons, server.pid)
    finally:
        code = _end(server)
    for path in left_behind:
        Path(path).unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


def _watch(*processes: int) -> set[str]:
    """Return when one of them or the input has ended, with what the server would leave behind."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    try:
        for process in processes:
            poll.register(os.pidfd_open(process), select.POLLIN)
    except ProcessLookupError:
        return set()
    found: set[str] = set()
    while not poll.poll(None if found else LOOK_MS):
        found = _left_behind()  # by now, since a server that is killed can no longer be asked
    return found | _left_behind()


def _end(server: "subprocess.Popen[bytes]") -> int:
    """End all descendants. Returns the server's exit code, or that of its end here.

    No SIGTERM: a server takes seconds to see that its children are gone, and saves nothing. Python's resource
    trackers are left to end by themselves, since they clean up what the others leave.
    """
    deadline = time.monotonic() + PATIENCE_S
    while processes := _descendants():
        late = time.monotonic() > deadline
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if late or "resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        server.poll()
        _reap(server.pid)
        time.sleep(0.02)
    return server.wait()


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _reap(server: int) -> None:
    """Collect orphans that have ended; the server's own end is for `Popen` to see."""
    for child in psutil.Process().children():
        if child.pid != server:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def _left_behind() -> set[str]:
    found: set[str] = set()
    for process in _descendants():
        with contextlib.suppress(OSError):  # it has ended
            found |= set(LEFT_BEHIND.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    return found


if __name__ == "__main__":
    sys.exit(main())
