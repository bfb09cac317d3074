"""Ends one SGLang server with all its processes on request, when its owner ends, or when the server has ended.

`SGLangServer` runs this file as a script. Its input brings a line of JSON, a `GuardRequest`, and stays open.
The end of the input means stop. After the guard has ended, no process of the server is left, inside or outside
its process group, and no file of it in shared memory or the folder for temporary files
(`tests/engines/sglang/test_guard.py`).

    starting --request--> watching --input closed | owner, stand-in or server ended--> ending --no child--> ended

The guard is a grandchild of the owner: Ray kills the children of an ending process, and a killed child has no time
to clean up. The child is a stand-in that waits for the guard and returns its exit code. Both import few modules,
since they live as long as the server.
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

from laminar_py.children import kernel
from laminar_py.records.host import socket_folder

PATIENCE_S = 3.0  # for resource trackers to end by themselves, which takes 0.1 s
LOOK_MS = 1000  # between two checks of a starting server
# SGLang never removes this file; no other file in shared memory belongs to the server
LEFT_BEHIND = re.compile(r"/dev/shm/sglang_loads_\w+\.shm")


@dataclass(frozen=True, slots=True)
class GuardRequest:
    """Command to run, e.g. `GuardRequest(["python", "-m", "sglang.launch_server"], {"api-key": "..."})`."""

    command: list[str]
    config: dict[str, str]  # secret flags, passed by a private file, since other users can read command lines


def main() -> int:
    """Run the server of the request on standard input. Returns its exit code as a shell would: 128 + signal."""
    line = sys.stdin.readline()
    if not line:
        return 1
    request = GuardRequest(**json.loads(line))
    stand_in, owner = os.getpid(), os.getppid()
    guard = os.fork()
    if guard:
        return os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    os.setsid()
    with tempfile.TemporaryDirectory(prefix="laminar-sglang-", dir=socket_folder()) as scratch:
        return _run(request, Path(scratch), stand_in, owner)


def _run(request: GuardRequest, scratch: Path, *owners: int) -> int:
    """Run the server until standard input closes, or it or one of `owners` ends. Returns its exit code."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process, so none escapes
    config = scratch / "config.yaml"
    config.write_text(json.dumps(request.config))  # JSON is YAML
    server = subprocess.Popen(
        [*request.command, "--config", str(config)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(scratch)},  # deleting the folder deletes its sockets
        preexec_fn=kernel.end_with_parent,  # in case the guard is killed
    )
    left_behind: set[str] = set()
    try:
        left_behind = _watch(*owners, server.pid)
    finally:
        code = _end(server)
    for path in left_behind:
        Path(path).unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


def _watch(*processes: int) -> set[str]:
    """Wait until standard input closes or a process ends. Returns files that the server would leave behind."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    try:
        for process in processes:
            poll.register(os.pidfd_open(process), select.POLLIN)
    except ProcessLookupError:
        return set()
    files: set[str] = set()
    while not poll.poll(None if files else LOOK_MS):
        files = _left_behind()  # read it early, since a server that has ended has no memory maps
    return files | _left_behind()


def _end(server: "subprocess.Popen[bytes]") -> int:
    """Kill all descendants. Returns the server's exit code.

    It sends no SIGTERM, since the server takes seconds to react and has nothing to save. Python's resource
    trackers get `PATIENCE_S` to end by themselves, since they clean up after the other processes.
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
    """Reap ended orphans, but not the server, whose exit code `Popen` needs."""
    for child in psutil.Process().children():
        if child.pid != server:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def _left_behind() -> set[str]:
    """Find files in shared memory that the running server maps and would never remove."""
    files: set[str] = set()
    for process in _descendants():
        with contextlib.suppress(OSError):  # it has ended
            files |= set(LEFT_BEHIND.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    return files


if __name__ == "__main__":
    sys.exit(main())
