"""Ways to signal every process that a program started. The zygote uses them; it adopts orphaned processes."""

import glob
import os
import signal
import socket
from typing import Protocol

from laminar_py.children import kernel


class Reaper(Protocol):
    """Signals all processes of a run. `leader` is the first of them, in a process group of its own."""

    def signal_all(self, number: int, *, leader: int) -> None:
        """Send a signal to each process. After SIGKILL none of them can start another one."""
        ...


class NamespaceReaper:
    """Signals every other process of a pid namespace. The zygote must be its first process."""

    def signal_all(self, number: int, *, leader: int) -> None:
        """Signal all processes by one call, which is atomic in the kernel."""
        assert os.getpid() == 1, "outside of a pid namespace of its own this would signal the whole machine"
        _send_signal(-1, number)


class UserReaper:
    """Signals every process of the slot's user, by a helper process that acts as that user. It needs root.

    The helper starts before any program, because programs may use up all processes. Its real and saved user differ
    from the programs' user, so no program can signal it.
    """

    def __init__(self, helper: socket.socket) -> None:
        self._helper = helper

    @classmethod
    def split(cls, helper: int, user: int, control: socket.socket) -> "UserReaper":
        """Fork. Only the child returns; the parent becomes the helper and exits after the child."""
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child:
            control.close()
            ours.close()
            _run_helper(theirs, helper, user)
            os.waitpid(child, 0)
            os._exit(0)
        theirs.close()
        kernel.end_with_parent()
        return cls(ours)

    def signal_all(self, number: int, *, leader: int) -> None:
        """Let the helper signal all processes by one call, which is atomic in the kernel."""
        self._helper.sendall(bytes([number]))
        if not self._helper.recv(1):
            raise OSError("the helper process that ends programs has exited, so this slot can end no program")


def _run_helper(connection: socket.socket, helper: int, user: int) -> None:
    """Act as the helper: send each signal number from `connection` to all processes of a user."""
    assert helper > 0 < user, "as root this would signal the whole machine"
    os.setgroups([])
    os.setresgid(helper, helper, helper)
    os.setresuid(helper, user, helper)
    assert os.getresuid() == (helper, user, helper), "as root this would signal the whole machine"
    while number := connection.recv(1):
        _send_signal(-1, number[0])
        connection.sendall(number)


class TreeReaper:
    """Signals all descendants of this process, which it finds one by one. For the weakest tiers.

    It stops each process that it finds. So a program that keeps forking soon reaches the limit of its cgroup.
    Without a cgroup, and where programs are not `alone`, a program that forks fast enough can escape.
    """

    def signal_all(self, number: int, *, leader: int) -> None:
        """Stop descendants until no new ones appear, then signal each."""
        _send_signal(-leader, number)
        stopped = set[int]()
        while new := _descendants(os.getpid()) - stopped:
            for process in new:
                _send_signal(process, signal.SIGSTOP)
            stopped |= new
        for process in stopped:
            _send_signal(process, number)


def end_all(reaper: Reaper, leader: int, status: int | None) -> int:
    """Kill all processes of a run and wait until none is left. Returns the exit status of the first process."""
    if status is None:
        _send_signal(leader, signal.SIGKILL)  # directly too: it may not have become the slot's user yet
        status = os.waitpid(leader, 0)[1]
    while _has_children():
        reaper.signal_all(signal.SIGKILL, leader=leader)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    return status


def _has_children() -> bool:
    """Return True if this process still has children, adopted orphans included."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _descendants(process: int) -> set[int]:
    """Return all descendants of a process."""
    children = set[int]()
    for path in glob.glob(f"/proc/{process}/task/*/children"):
        try:
            with open(path) as file:
                children |= {int(word) for word in file.read().split()}
        except (FileNotFoundError, ProcessLookupError):  # the process ended meanwhile
            continue
    return children.union(*(_descendants(child) for child in children))


def _send_signal(target: int, number: int) -> None:
    try:
        os.kill(target, number)
    except ProcessLookupError:  # the process has ended
        return
