"""Pools of the tiers that this machine offers, and what must not be left of them."""

import asyncio
import os
import socket
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio

from laminar_contrib.sandbox.inside.messages import SandboxLimits
from laminar_contrib.sandbox.pool import SandboxPool
from laminar_contrib.sandbox.records import SandboxTier
from laminar_contrib.sandbox.slot import SandboxSlot
from laminar_py.children import landlock

# a busy machine may give a program no core for seconds
TIGHT = SandboxLimits(cpu_s=1.0, wall_s=5.0, memory_bytes=128 << 20, file_bytes=4 << 20, output_bytes=1 << 16)
BOUND_S = 60.0
SONG = "unchanged"


@pytest.fixture(scope="session", autouse=True)
def own_folder():
    """A folder for temporary files of our own, in which nobody else's sandboxes are."""
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        yield
    tempfile.tempdir = before[0]
    if before[1] is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before[1]


@pytest.fixture(scope="module", params=list(SandboxTier), ids=lambda tier: tier.value)
def tier(request):
    if request.param is SandboxTier.LANDLOCK and not landlock.version():
        pytest.skip("the kernel has no Landlock")
    return request.param


class UnfencedPool(SandboxPool):
    """A pool that uses no fences even where the machine has them."""

    async def _choose(self, folder):
        self._slots = [SandboxSlot(folder, f"{number}", tier=SandboxTier.NONE) for number in range(self._number)]
        await self._slots[0].start()


def pool_of(tier, **options):
    """A pool that uses this tier."""
    return (UnfencedPool if tier is SandboxTier.NONE else SandboxPool)(**options)


@pytest.fixture(scope="session")
def server():
    """A server of the host's that no program may reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tier, server):
    before = traces()
    async with pool_of(tier, slots=2, limits=TIGHT) as pool:
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


async def until(true):
    async with asyncio.timeout(BOUND_S):
        while not true():  # noqa: ASYNC110 - processes tell nobody that they are there
            await asyncio.sleep(0.01)


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
    return {
        "children": {pid for pid in pids() if parent(pid) == os.getpid()},
        "folder": set(Path(tempfile.gettempdir()).iterdir()),
        "descriptors": set(range(len(os.listdir("/dev/fd")))),
    }


def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if Path("/proc").exists() else []


def parent(pid):
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rsplit(")", 1)[1].split()[1])
