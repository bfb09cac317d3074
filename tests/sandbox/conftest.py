"""Pools of the tiers that this machine offers, and what must not be left of them."""

import asyncio
import os
import socket
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio

from laminar_contrib.sandbox import places
from laminar_contrib.sandbox.inside.messages import SandboxLimits
from laminar_contrib.sandbox.pool import SandboxPool, survey_tiers
from laminar_contrib.sandbox.records import SandboxTier

TIGHT = SandboxLimits(
    cpu_s=1.0, wall_s=5.0, memory_bytes=128 << 20, processes=8, file_bytes=4 << 20, output_bytes=1 << 16
)  # a busy machine may give a program no core for seconds
BOUND_S = 60.0
SONG = "unchanged"


@pytest.fixture(scope="session", autouse=True)
def own_lane():
    """A folder for temporary files of our own, hence users and names that nobody else's sandboxes have."""
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        places._make_base()
        (places._base() / "kept").touch()
        yield
    tempfile.tempdir = before[0]
    if before[1] is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before[1]


@pytest.fixture(scope="session")
def offers(own_lane):
    return {offer.tier: offer for offer in asyncio.run(survey_tiers())}


@pytest.fixture(scope="module", params=list(SandboxTier), ids=lambda tier: tier.value)
def tier(request, offers):
    if not offers[request.param].offered:
        pytest.skip(offers[request.param].reason)
    return request.param


@pytest.fixture(scope="session")
def server():
    """A server of the host's that no program may reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tier, server):
    before = traces()
    async with SandboxPool(slots=2, require=tier, tier=tier, limits=TIGHT) as pool:
        yield pool
    assert left_since(before) == {}


@pytest.fixture
def canary():
    """A file of the host's that its modes alone would open to everybody, alone in its folder."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        file = Path(folder, "canary")
        file.write_text(SONG)
        file.parent.chmod(0o777)
        file.chmod(0o666)
        yield file


def metadata(file):
    """What a program may not change of a file and its folder, either."""
    states = [(path, path.stat()) for path in (file, file.parent)]
    xattrs = hasattr(os, "listxattr")
    return [
        (one.st_mode, one.st_uid, one.st_mtime_ns, os.listxattr(path) if xattrs else []) for path, one in states
    ]


def left_since(before):
    """Traces that were not there before; those of other tests may end meanwhile."""
    return {kind: new for kind, found in traces().items() if (new := found - before[kind])}


def traces():
    """Everything that our sandboxes could leave on this machine, by kind."""
    first = places.first_user() if places.may_change_user() else 0
    users = range(first, first + 2 * places.NUM_SLOTS if first else 0)
    base = places._base()
    mounts = Path("/proc/self/mountinfo")
    mounted = mounts.read_text().splitlines() if mounts.exists() else []
    return {
        "processes": {pid for pid in pids() if owner(pid) in users and places._runs_as(str(pid), owner(pid))},
        "children": {pid for pid in pids() if parent(pid) == os.getpid()},
        "folder": set(base.iterdir()),
        "cgroups": set(Path("/sys/fs/cgroup").glob(f"**/laminar-sandbox-{places._lane()}-*")),
        "mounts": {line for line in mounted if str(base) in line},
        "descriptors": set(range(len(os.listdir("/dev/fd")))),
    }


def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if Path("/proc").exists() else []


def owner(pid):
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return None


def parent(pid):
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rsplit(")", 1)[1].split()[1])
