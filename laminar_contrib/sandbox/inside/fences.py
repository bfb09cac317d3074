"""Fences that a child of the zygote applies before it runs a program: limits, user, Landlock, seccomp.

The zygote makes them once. `apply` applies all of them or raises (law 10).
"""

import math
import os
import resource
from collections.abc import Iterator

from laminar_contrib.sandbox.inside import seccomp
from laminar_contrib.sandbox.inside.messages import SandboxLimits
from laminar_py.children import kernel, landlock

NUM_DESCRIPTORS = 64
SPARE = 8  # processes that the user's limit allows above the cgroup's: only the cgroup counts refusals
ADDRESS_SPACE = 4  # times the memory limit, where a cgroup bounds the memory in use
HIDDEN = ("site-packages", "dist-packages")  # installed packages, in a folder of the standard library


class Fences:
    """Fences around every program of a slot.

    Programs run as `user`, or as the zygote's user if it is None. `walls` turns Landlock and seccomp on. `shared`
    is True if programs see the host's files. `SlotSetup` explains `alone` and `counted`.
    """

    def __init__(self, *, user: int | None, walls: bool, shared: bool, alone: bool, counted: bool) -> None:
        if walls and not seccomp.offered():
            raise OSError(f"seccomp is not known of {kernel.MACHINE}")
        self._user = user
        self._walls = walls
        self._alone = alone
        self._counted = counted
        self._shared = shared
        self._filter = self._assemble() if walls and not alone else b""
        self._rules = -1
        self._processes = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._space = 0

    def measure_address_space(self) -> None:
        """Read the zygote's address space, so that limits of programs do not include it."""
        file = os.open("self/statm", os.O_RDONLY, dir_fd=self._processes)
        self._space = int(os.read(file, 100).split()[0]) * resource.getpagesize()
        os.close(file)

    def allow_paths(self, *, readable: list[str], home: str) -> None:
        """Let programs read the paths `readable` and write into the folder `home`."""
        if self._walls and landlock.version():
            devices = [(path, landlock.USE) for path in ("/dev/null", "/dev/zero", "/dev/urandom")]
            rules = [*_without_hidden(readable), (home, landlock.OWN), *devices]
            old, self._rules = self._rules, landlock.ruleset(rules)
            if old >= 0:
                os.close(old)

    def apply(self, limits: SandboxLimits, *, session: bool) -> None:
        """Apply all fences to the calling child. Raises `OSError` if the kernel refuses one."""
        os.setsid()
        self._accept_oom_kill()
        self._set_limits(limits, session=session)
        if self._user is not None:
            os.setgroups([])
            os.setresgid(self._user, self._user, self._user)
            os.setresuid(self._user, self._user, self._user)
        if self._walls:
            kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)
            kernel.keep_capabilities(0)
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.end_with_parent()
        if self._rules >= 0:
            landlock.restrict(self._rules)
        if self._walls:
            seccomp.apply_filter(self._assemble(alone=os.getpid()) if self._alone else self._filter)

    def _assemble(self, *, alone: int = 0) -> bytes:
        return seccomp.assemble(alone=alone, shared=self._shared, own_user=self._user is not None)

    def _accept_oom_kill(self) -> None:
        """Make the kernel kill this process first when memory is short, before the zygote and others."""
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else the file belongs to root
        file = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=self._processes)
        os.write(file, b"1000")
        os.close(file)

    def _set_limits(self, limits: SandboxLimits, *, session: bool) -> None:
        """Set the resource limits of this process from `limits`.

        In a session each piece of code gets CPU time of its own, so the hard limit on CPU time stays open.
        """
        seconds = math.ceil(limits.cpu_s)
        most = resource.RLIM_INFINITY if session else seconds + 1
        kernel.limit(resource.RLIMIT_CPU, seconds, most=most)
        kernel.limit(resource.RLIMIT_CORE, 0)
        kernel.limit(resource.RLIMIT_NOFILE, NUM_DESCRIPTORS)
        kernel.limit(resource.RLIMIT_FSIZE, max(limits.file_bytes, limits.output_bytes + 1))
        wanted = limits.memory_bytes * (ADDRESS_SPACE if self._counted else 1)
        kernel.limit(resource.RLIMIT_AS, self._space + wanted)
        kernel.limit(resource.RLIMIT_MEMLOCK, 0)
        kernel.limit(resource.RLIMIT_MSGQUEUE, 0)
        if self._walls and not self._alone:
            others = 2 if self._user is None else 0  # the launcher and the zygote are the same user then
            kernel.limit(resource.RLIMIT_NPROC, limits.processes + others + (SPARE if self._counted else 0))


def _without_hidden(paths: list[str]) -> Iterator[tuple[str, int]]:
    """Yield rights to read these paths, without installed packages in them.

    A Landlock rule can only add rights to the rule of a parent folder. So a folder with packages may be listed,
    and each of its other entries gets a rule of its own.
    """
    for path in paths:
        hidden = [name for name in HIDDEN if os.path.isdir(os.path.join(path, name))]
        yield path, landlock.READ_DIR if hidden else landlock.READ
        if hidden:
            names = [name for name in os.listdir(path) if name not in hidden]
            yield from ((os.path.join(path, name), landlock.READ) for name in names)
