"""Which file systems go over a network, by what the kernel lists of them."""

import os
from pathlib import Path

import pytest

from laminar_py.ledger.live import network_kind

ROOT = "27 1 0:0 / / rw,relatime - ext4 /dev/vda rw"


def mounts(folder, kind):
    """A list in which the device of a folder has a file system of that kind."""
    device = os.stat(folder).st_dev
    mine = f"31 27 {os.major(device)}:{os.minor(device)} /runs /mnt/my\\040runs rw shared:7"
    return f"{ROOT}\n{mine} - {kind} server:/runs rw\n"


@pytest.mark.parametrize(
    "kind",
    ["nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "wekafs", "fuse.sshfs"],
)
def test_what_goes_over_a_network_is_named(tmp_path, kind):
    assert network_kind(tmp_path, mounts(tmp_path, kind)) == kind
    assert network_kind(tmp_path / "not/yet/there", mounts(tmp_path, kind)) == kind


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.mergerfs"])
def test_disks_of_this_host_and_its_memory_are_no_network(tmp_path, kind):
    assert network_kind(tmp_path, mounts(tmp_path, kind)) is None


def test_a_link_to_a_folder_is_where_that_folder_is(tmp_path):
    (tmp_path / "link").symlink_to("/proc/self", target_is_directory=True)
    assert network_kind(tmp_path / "link", mounts(tmp_path, "nfs4")) is None


def test_a_device_that_is_not_listed_is_no_network(tmp_path):
    assert network_kind(tmp_path, ROOT) is None


def test_this_hosts_own_list_is_read(tmp_path):
    assert network_kind(tmp_path / "a") == network_kind(tmp_path)
    assert network_kind(Path("/dev/shm")) is None
