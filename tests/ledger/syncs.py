"""A disk that cannot sync: in a thread the kernel answers fsync and fdatasync with an error, and no other call."""

import errno
from concurrent.futures import ThreadPoolExecutor

from laminar_contrib.sandbox.inside import seccomp
from laminar_py.children import kernel

CALLS = {"x86_64": (74, 75), "aarch64": (82, 83)}.get(kernel.MACHINE, ())  # fsync, fdatasync


def without_sync(work, *arguments):
    """What `work` returns or raises on such a disk."""
    with ThreadPoolExecutor(1, initializer=refuse) as thread:
        return thread.submit(work, *arguments).result()


def refuse():
    """Both settings are this thread's own, and end with it."""
    refused = [op for number in CALLS for op in seccomp._case(number, [seccomp._refuse(errno.EIO)])]
    number, allow = seccomp._op(seccomp.LOAD, seccomp.NUMBER), seccomp._op(seccomp.RETURN, seccomp.ALLOW)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.apply_filter(b"".join([number, *refused, allow]))
