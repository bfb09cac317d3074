"""Fences that a child of the zygote applies before it runs a program: limits, capabilities, Landlock, seccomp.

The zygote makes them once. `apply` applies all of them or raises (law 10).
"""

import glob
import math
import os
import resource
import sys
import sysconfig
from collections.abc import Iterator

from laminar_contrib.sandbox.inside import seccomp
from laminar_contrib.sandbox.inside.messages import SandboxLimits
from laminar_py.children import kernel, landlock

NUM_DESCRIPTORS = 64
MOST_THREADS = 256
HIDDEN = ("site-packages", "dist-packages")  # installed packages, in a folder of the standard library
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


class Fences:
    """Fences around every program of a slot. With `walls` False they are limits alone.

    Raises `OSError` if there should be walls and this kernel has no Landlock, or an unknown processor.
    """

    def __init__(self, *, walls: bool) -> None:
        if walls and not seccomp.offered():
            raise OSError(f"no seccomp filter is known for machine {kernel.MACHINE}")
        if walls and not landlock.version():
            raise OSError("this kernel has no Landlock, or it is disabled at boot")
        self._walls = walls
        self._filter = seccomp.assemble() if walls else b""
        self._readable = list(_readable()) if walls else []
        self._rules = -1
        self._processes = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._space = 0

    def measure_address_space(self) -> None:
        """Read the zygote's address space, so that limits of programs do not include it."""
        file = os.open("self/statm", os.O_RDONLY, dir_fd=self._processes)
        self._space = int(os.read(file, 100).split()[0]) * resource.getpagesize()
        os.close(file)

    def has_too_many_threads(self, process: int) -> bool:
        """Return True if a process has more than `MOST_THREADS`; False if /proc hides the process."""
        try:
            links = os.stat(f"{process}/task", dir_fd=self._processes).st_nlink  # two, and one for each thread
        except OSError:
            return False
        return links - 2 > MOST_THREADS

    def allow_home(self, path: str) -> None:
        """Let programs write into the folder `path`, and read Python and its libraries."""
        if self._walls:
            devices = [(device, landlock.USE) for device in DEVICES]
            old, self._rules = self._rules, landlock.ruleset([*self._readable, (path, landlock.OWN), *devices])
            if old >= 0:
                os.close(old)

    def apply(self, limits: SandboxLimits, *, session: bool) -> None:
        """Apply all fences to the calling child. Raises `OSError` if the kernel refuses one."""
        os.setsid()
        self._accept_oom_kill()
        self._set_limits(limits, session=session)
        if self._walls:
            kernel.keep_capabilities(0)
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.end_with_parent()
        if self._walls:
            landlock.restrict(self._rules)
            seccomp.apply_filter(seccomp.for_process(self._filter, os.getpid()))

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
        kernel.limit(resource.RLIMIT_AS, self._space + limits.memory_bytes)
        kernel.limit(resource.RLIMIT_MEMLOCK, 0)
        kernel.limit(resource.RLIMIT_MSGQUEUE, 0)


def _readable() -> Iterator[tuple[str, int]]:
    """Yield rights to read Python and its libraries, without installed packages.

    A Landlock rule can only add rights to the rule of a parent folder. So a folder with packages may be listed,
    and each of its other entries gets a rule of its own.
    """
    own = glob.glob(os.path.join(str(sysconfig.get_config_var("LIBDIR")), "*.so*"))
    for path in (*filter(os.path.exists, sys.path), os.path.realpath(sys.executable), *LIBRARIES, *own):
        hidden = [name for name in HIDDEN if os.path.isdir(os.path.join(path, name))]
        yield path, landlock.READ_DIR if hidden else landlock.READ
        if hidden:
            names = [name for name in os.listdir(path) if name not in hidden]
            yield from ((os.path.join(path, name), landlock.READ) for name in names)
