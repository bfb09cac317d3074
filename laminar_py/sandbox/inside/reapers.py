"""Ways to reach every process that a program started, from the zygote, to which the orphans among them come."""

import glob
import os
import signal
import socket
import sys
from typing import Protocol

from laminar_py.sandbox.inside import kernel


class Reaper(Protocol):
    """Signals to all processes of a run, whose first one is `leader`, of a process group of its own."""

    def signal_all(self, number: int, *, leader: int) -> None:
        """Send a signal to each; after SIGKILL none of them can start another one."""
        ...


class NamespaceReaper:
    """For the first process of a pid namespace: everything else in there."""

    def signal_all(self, number: int, *, leader: int) -> None:
        """Signal by one call, which the kernel makes atomic."""
        assert os.getpid() == 1, "outside of a pid namespace of its own this would signal the whole machine"
        _send(-1, number)


class UserReaper:
    """For root: everything that runs as the slot's own user, signalled by a helper that has become that user.

    The helper was there before any program, since none can be started while they use up all processes; its real
    and saved user are another one, so that no program can signal it.
    """

    def __init__(self, helper: socket.socket) -> None:
        self._helper = helper

    @classmethod
    def split(cls, helper: int, user: int, control: socket.socket) -> "UserReaper":
        """Fork: returns in the child alone; the parent becomes the helper, and exits after the child."""
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child:
            control.close()
            ours.close()
            _help(theirs, helper, user)
            os.waitpid(child, 0)
            os._exit(0)
        theirs.close()
        kernel.end_with_parent()
        return cls(ours)

    def signal_all(self, number: int, *, leader: int) -> None:
        """Signal by one call too, of the helper's."""
        self._helper.sendall(bytes([number]))
        if not self._helper.recv(1):
            raise OSError("the helper that ends programs is gone")


def _help(orders: socket.socket, helper: int, user: int) -> None:
    """Signal all processes of a user, as often as it is ordered."""
    assert helper > 0 < user, "as root this would signal the whole machine"
    os.setgroups([])
    os.setresgid(helper, helper, helper)
    os.setresuid(helper, user, helper)
    assert os.getresuid() == (helper, user, helper), "as root this would signal the whole machine"
    while order := orders.recv(1):
        _send(-1, order[0])
        orders.sendall(order)


class TreeReaper:
    """For the weakest tiers: all below this process, found one by one.

    Each is stopped when it is found, so that a program which starts processes runs out of them where a cgroup
    counts them; where nothing does and programs are not `alone`, one that is fast enough gets away.
    """

    def signal_all(self, number: int, *, leader: int) -> None:
        """Stop all that are found until no more are, then signal each."""
        _send(-leader, number)
        found = set[int]()
        while new := _below(os.getpid()) - found:
            for process in new:
                _send(process, signal.SIGSTOP)
            found |= new
        for process in found:
            _send(process, number)


def end_all(reaper: Reaper, leader: int, status: int | None) -> int:
    """Kill all processes of a run and wait until none is left; gives the first one's status, known or not."""
    if status is None:
        _send(leader, signal.SIGKILL)  # by itself too: it may not have become the slot's user yet
        status = os.waitpid(leader, 0)[1]
    while _any_left():
        reaper.signal_all(signal.SIGKILL, leader=leader)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    return status


def _any_left() -> bool:
    """False where all children of this process have ended, and with them all that came to it as orphans."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _below(process: int) -> set[int]:
    """Processes below one; those of the group alone can be found on other systems."""
    if sys.platform != "linux":
        return set()
    found = set[int]()
    for path in glob.glob(f"/proc/{process}/task/*/children"):
        try:
            with open(path) as file:
                found |= {int(word) for word in file.read().split()}
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return found.union(*(_below(child) for child in found))


def _send(target: int, number: int) -> None:
    try:
        os.kill(target, number)
    except ProcessLookupError:  # nobody is there any more
        return
