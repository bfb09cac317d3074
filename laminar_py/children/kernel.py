"""System calls of Linux for which Python 3.11 has no function. Each raises `OSError` with the name of the call."""

import ctypes
import os
import platform
import resource
import signal

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION = 0x20080522
MACHINE = platform.machine()

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: object) -> int:
    """Call a function of the C library by name, e.g. `call("unshare", flags)`; integers are passed as `long`."""
    wide = [ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args]
    return _checked(getattr(_libc, name)(*wide), name)


def syscall(number: int, *args: object) -> int:
    """Make a system call by its number and return its result."""
    return _checked(_libc.syscall(ctypes.c_long(number), *args), f"system call {number}")


def prctl(option: int, *args: object) -> int:
    """Change a setting of this process (`man 2 prctl`); arguments are integers or pointers."""
    return call("prctl", option, *args, *[0] * (4 - len(args)))


def end_with_parent(number: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Let the kernel send a signal to this process when its parent ends, however it ends.

    The kernel forgets the request when the calling thread ends, and when the process changes its user. Give the
    process id of the `parent` if it may have ended before this call: this process then exits at once.
    """
    prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + number)


def limit(kind: int, bound: int, *, most: int | None = None) -> None:
    """Set a resource's soft limit to `bound` and its hard limit to `most`, e.g. `limit(resource.RLIMIT_CORE, 0)`.

    `most` is `bound` by default. A hard limit that is already lower stays.
    """
    _, hard = resource.getrlimit(kind)
    highest = bound if most is None else most
    if hard != resource.RLIM_INFINITY:
        highest = hard if highest == resource.RLIM_INFINITY else min(highest, hard)
    soft = bound if highest == resource.RLIM_INFINITY else min(bound, highest)
    resource.setrlimit(kind, (soft, highest))


def keep_capabilities(mask: int) -> None:
    """Drop the capabilities that are not in `mask`; add none that this process lacks."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # low halves of effective, permitted, inheritable; then the high halves
    call("capget", header, sets)
    low, high = mask & sets[1], mask >> 32 & sets[4]
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    call("capset", header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0))


def _checked(result: int, name: str) -> int:
    """Return the result of the C function `name`; raise `OSError` with the thread's errno if it is -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
