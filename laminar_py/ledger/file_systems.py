"""Detection of network file systems, whose lack of shared memory breaks SQLite's write-ahead log.

The start of a run and of a resume calls it. An unknown file system counts as a disk of this host.
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
    *("gfs", "gfs2", "ocfs2", "acfs"),  # disks that several hosts share
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
    """Return the type of a folder's network file system, e.g. "nfs4"; None for a disk of this host.

    The folder need not exist. `mounts` replaces the kernel's `/proc/self/mountinfo`.
    """
    kind = _kind(folder, _MOUNTS.read_text() if mounts is None else mounts)
    is_remote = kind in _NETWORK or (kind.startswith(_FUSE) and kind.removeprefix(_FUSE) not in _LOCAL_FUSE)
    return kind if is_remote else None


def _kind(folder: Path, mounts: str) -> str:
    """Find the type by device number, which no later mount hides; "" if no line has the number, as in Btrfs."""
    place = folder.resolve()
    device = next(path for path in (place, *place.parents) if path.exists()).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0]
    return ""
