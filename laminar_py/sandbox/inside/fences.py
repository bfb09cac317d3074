"""Fences that a child of the zygote puts on before it runs a program: limits, user, Landlock, seccomp.

Made once by the zygote; invariant: `put_on` has put everything on when it returns, and raises otherwise.
"""

import math
import os
import resource
import sys
from collections.abc import Iterator

from laminar_py.sandbox.inside import kernel, landlock, seccomp
from laminar_py.sandbox.inside.wire import SandboxLimits

NUM_DESCRIPTORS = 64
SPARE = 8  # processes that the user's own limit allows above a cgroup's, which tells when it refuses
ADDRESS_SPACE = 4  # times the memory, where a cgroup counts what is really used
HIDDEN = ("site-packages", "dist-packages")  # what others installed beside the standard library
LINUX = sys.platform == "linux"


class Fences:
    """Fences of all runs of a slot.

    `user` is whom programs run as, None for the zygote's own; `walls` turns Landlock and seccomp on; `shared` is
    True where programs can name the host's files; `alone` and `counted` are as in `SlotSetup`.
    """

    def __init__(self, *, user: int | None, walls: bool, shared: bool, alone: bool, counted: bool) -> None:
        if walls and not (LINUX and seccomp.offered()):
            raise OSError(f"seccomp is not known of {sys.platform} on {kernel.MACHINE}")
        self._user = user
        self._walls = walls
        self._alone = alone
        self._counted = counted
        self._shared = shared
        self._filter = self._assemble() if walls and not alone else b""
        self._rules = -1
        self._processes = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if LINUX else -1
        self._space = 0

    def measure(self) -> None:
        """Take the address space of the zygote as what programs have before they begin."""
        if LINUX:
            file = os.open("self/statm", os.O_RDONLY, dir_fd=self._processes)
            self._space = int(os.read(file, 100).split()[0]) * resource.getpagesize()
            os.close(file)

    def allow(self, *, readable: list[str], home: str) -> None:
        """Files that programs may read, and the folder that is theirs."""
        if self._walls and landlock.version():
            devices = [(path, landlock.USE) for path in ("/dev/null", "/dev/zero", "/dev/urandom")]
            rules = [*_without_hidden(readable), (home, landlock.OWN), *devices]
            old, self._rules = self._rules, landlock.ruleset(rules)
            if old >= 0:
                os.close(old)

    def put_on(self, limits: SandboxLimits, *, session: bool) -> None:
        """Called by the child with only the zygote's descriptors open; what is refused raises `OSError`."""
        os.setsid()
        if LINUX:
            self._die_first()
        self._limit(limits, session=session)
        if self._user is not None:
            os.setgroups([])
            os.setresgid(self._user, self._user, self._user)
            os.setresuid(self._user, self._user, self._user)
        if self._walls:
            kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)
            kernel.keep_capabilities(0)
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if LINUX:
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
            kernel.end_with_parent()
        if self._rules >= 0:
            landlock.restrict(self._rules)
        if self._walls:
            seccomp.put_on(self._assemble(alone=os.getpid()) if self._alone else self._filter)

    def _assemble(self, *, alone: int = 0) -> bytes:
        return seccomp.assemble(alone=alone, shared=self._shared, own_user=self._user is not None)

    def _die_first(self) -> None:
        """Be what the kernel ends when memory is short, before the zygote and all else."""
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # the file belongs to root otherwise
        file = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=self._processes)
        os.write(file, b"1000")
        os.close(file)

    def _limit(self, limits: SandboxLimits, *, session: bool) -> None:
        seconds = math.ceil(limits.cpu_s)
        most = resource.RLIM_INFINITY if session else seconds + 1
        kernel.limit(resource.RLIMIT_CPU, seconds, most=most)
        kernel.limit(resource.RLIMIT_CORE, 0)
        kernel.limit(resource.RLIMIT_NOFILE, NUM_DESCRIPTORS)
        kernel.limit(resource.RLIMIT_FSIZE, max(limits.file_bytes, limits.output_bytes + 1))
        if LINUX:
            wanted = limits.memory_bytes * (ADDRESS_SPACE if self._counted else 1)
            kernel.limit(resource.RLIMIT_AS, self._space + wanted)
            kernel.limit(resource.RLIMIT_MEMLOCK, 0)
            kernel.limit(resource.RLIMIT_MSGQUEUE, 0)
            if self._walls and not self._alone:
                others = 2 if self._user is None else 0  # the launcher and the zygote are the same user then
                kernel.limit(resource.RLIMIT_NPROC, limits.processes + others + (SPARE if self._counted else 0))


def _without_hidden(paths: list[str]) -> Iterator[tuple[str, int]]:
    """Rights to read these, without what others installed in them: a rule can only add to those above it."""
    for path in paths:
        hidden = [name for name in HIDDEN if os.path.isdir(os.path.join(path, name))]
        yield path, landlock.READ_DIR if hidden else landlock.READ
        if hidden:
            names = [name for name in os.listdir(path) if name not in hidden]
            yield from ((os.path.join(path, name), landlock.READ) for name in names)
