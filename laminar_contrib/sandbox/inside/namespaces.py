"""The strongest tier: the zygote is the first process of new namespaces, with a root of the files it may see.

If we are root, we bind the files before we create the user namespace: inside it the zygote has no rights on the
host and could not reach them. Without root the order is reversed: only inside a user namespace may we mount.
"""

import os
import socket
from collections.abc import Callable

from laminar_contrib.sandbox.inside.fences import HIDDEN
from laminar_contrib.sandbox.inside.messages import SlotSetup
from laminar_py.children import kernel

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
REST = (
    kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)
USER = 1000  # user id of programs inside the namespace
ST_KEPT = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC  # flags of a mount that a bind of it must repeat


def enter(setup: SlotSetup, control: socket.socket, *, readable: list[str], map_users: Callable[[], None]) -> None:
    """Move into new mount, user and process namespaces, with only `readable` paths in sight, and fork there.

    Only the child returns, as the root of the namespaces; the parent waits for the child and exits. `map_users`
    asks the owner to write the user map of this process.
    """
    if setup.uids:
        kernel.unshare(kernel.CLONE_NEWNS)
    else:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUSER)
        map_users()
    _build(setup.folder, readable=readable)
    kernel.pivot_root(setup.folder)
    if setup.uids:
        kernel.unshare(REST | kernel.CLONE_NEWNS | kernel.CLONE_NEWUSER)
        map_users()
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    else:
        kernel.unshare(REST)
    child = os.fork()
    if child:
        control.close()
        os.waitpid(child, 0)
        os._exit(0)
    kernel.end_with_parent()
    kernel.drop_bounding_set()


def _build(folder: str, *, readable: list[str]) -> None:
    """Build a read-only root on `folder`, with these paths under the names that they have on the host."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", folder, "tmpfs", flags=flags, data="size=1m,nr_inodes=4096,mode=0755")
    for link in ("/bin", "/lib", "/lib64", "/sbin"):
        if os.path.islink(link):
            os.symlink(os.readlink(link), folder + link)
    for path in [*readable, *DEVICES]:
        if not any(path.startswith(f"{other}/") for other in readable):
            _bind(path, folder + path)
    for path in readable:
        for name in HIDDEN:
            if os.path.isdir(target := f"{folder}{path}/{name}"):
                kernel.mount("tmpfs", target, "tmpfs", flags=flags | kernel.MS_RDONLY, data="size=4k,mode=0755")
    os.mkdir(f"{folder}/tmp")
    kernel.mount("none", folder, flags=kernel.MS_REMOUNT | kernel.MS_RDONLY | flags)


def _bind(source: str, target: str) -> None:
    """Bind a file or folder at `target`, read-only and without setuid; copy a symlink as it is."""
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if not os.path.isdir(source):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    kernel.mount(source, target, flags=kernel.MS_BIND)
    kept = os.statvfs(target).f_flag & ST_KEPT
    device = 0 if source in DEVICES else kernel.MS_NODEV
    flags = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID
    kernel.mount("none", target, flags=flags | kept | device)
