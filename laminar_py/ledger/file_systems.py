"""File systems that go over a network, on which SQLite's log does not work: its readers and writer share memory.

Asked before a run is made or taken up. What is not known to be of that kind counts as a disk of this host, and so
does shared memory.
"""

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "auristorfs", "coda", "ncpfs", "davfs"),
    *(
        "lustre",
        "gpfs",
        "mmfs",
        "beegfs",
        "beegfs_nodev",
        "ceph",
        "wekafs",
        "glusterfs",
        "orangefs",
        "pvfs2",
        "panfs",
    ),
    *("gfs", "gfs2", "ocfs2", "acfs"),  # of disks that several hosts share
}
_FUSE = "fuse."
_LOCAL_FUSE = {
    "fuse-overlayfs",
    "mergerfs",
    "unionfs",
    "bindfs",
    "ntfs-3g",
    "gocryptfs",
    "encfs",
    "cryfs",
    "lxcfs",
}


def network_kind(folder: Path, mounts: str | None = None) -> str | None:
    """Type of the file system of a folder that is there, or will be, e.g. "nfs4"; None for one of this host.

    `mounts` is what the kernel lists in `/proc/self/mountinfo`.
    """
    kind = _kind(folder, _MOUNTS.read_text() if mounts is None else mounts)
    is_remote = kind in _NETWORK or (kind.startswith(_FUSE) and kind.removeprefix(_FUSE) not in _LOCAL_FUSE)
    return kind if is_remote else None


def _kind(folder: Path, mounts: str) -> str:
    """By the number of its device, which no later mount hides; "" where no line has that, as in Btrfs."""
    place = folder.resolve()
    device = next(path for path in (place, *place.parents) if path.exists()).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0]
    return ""
