"""System calls of Linux for which Python 3.11 has no function. Each raises `OSError` with the name of the call."""

import ctypes
import errno
import os
import platform
import resource
import signal

CLONE_FS = 0x00000200
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION = 0x20080522
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MACHINE = platform.machine()

_libc = ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *args: object) -> int:
    """Make a system call by its number and return its result."""
    return _checked(_libc.syscall(ctypes.c_long(number), *args), f"system call {number}")


def mount(source: str, target: str, kind: str = "", *, flags: int = 0, data: str = "") -> None:
    """Mount a file system, bind a path, or remount with other `flags`."""
    arguments = (os.fsencode(text) for text in (source, target, kind))
    _checked(_libc.mount(*arguments, ctypes.c_ulong(flags), data.encode()), f"mount on {target}")


def unmount(target: str) -> None:
    """Detach a mount. The kernel frees it when no process has it open."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount of {target}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _checked(_libc.unshare(flags), "unshare")


def enter(namespace: int, kind: int) -> None:
    """Move this thread into the namespace of a file descriptor."""
    _checked(_libc.setns(namespace, kind), "setns")


def pivot_root(folder: str) -> None:
    """Make a mounted folder the root of this process, and detach the old root."""
    os.chdir(folder)
    syscall(SYS_PIVOT_ROOT[MACHINE], b".", b".")
    unmount(".")
    os.chdir("/")


def prctl(option: int, *args: object) -> int:
    """Change a setting of this process (`man 2 prctl`); arguments are integers or pointers."""
    wide = [ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args]
    wide += [ctypes.c_ulong(0)] * (4 - len(wide))
    return _checked(_libc.prctl(option, *wide), f"prctl {option}")


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
    """Drop all capabilities but these, which this process must hold already."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    sets = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)  # effective, permitted, inheritable, twice
    _checked(_libc.capset(header, sets), "capset")


def held_capabilities() -> int:
    """Return the effective capabilities of this process, as a bit mask."""
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _checked(_libc.capget(header, sets), "capget")
    return sets[1] | sets[4] << 32


def drop_bounding_set() -> None:
    """Prevent programs that this process starts from gaining any capability."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the number is beyond this kernel's last capability
                raise
            return


def _checked(result: int, name: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
