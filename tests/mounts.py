"""Mounts and namespaces for tests of several hosts on one machine; they need root."""

import os

from laminar_py.children import kernel

CLONE_FS, CLONE_NEWNS = 0x00000200, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2


def mount(source: str, target: str, kind: str = "", *, flags: int = 0, data: str = "") -> None:
    arguments = (os.fsencode(text) for text in (source, target, kind))
    kernel.call("mount", *arguments, flags, data.encode())


def unmount(target: str) -> None:
    kernel.call("umount2", os.fsencode(target), MNT_DETACH)


def unshare(flags: int) -> None:
    kernel.call("unshare", flags)


def enter(namespace: int, kind: int) -> None:
    """Move this thread into the namespace of a file descriptor."""
    kernel.call("setns", namespace, kind)
