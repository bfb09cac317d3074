"""A fleet of node processes, what may be done to it, and witnesses who compare what they get with the original.

The test is the keeper of its nodes, as the runtime is of a run's: it starts again what it killed. A node that dies
of itself is a failure, but for one whose folder was deleted under it.
"""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import load_file

from laminar_py.records.weights import Published, PulledVersion, VersionLostError
from laminar_py.relay.subscriber import RelayError, Subscriber
from laminar_py.relay.tree import Topology
from laminar_py.relay.version_store import SPARE, complete_versions
from tests.relay.fleet import Member, Mischief
from tests.relay.tree import CHUNK, KEYS, apply_changes, digest

HEARTBEAT_S = 0.3
KEEP = 2
SMALL = "relay-4"  # whose store is a file system of its own
LIMIT_S = 200.0
SETTLE_S = 90.0

# libzmq 4.3.5 ends the process where a connection breaks just as it becomes writable (zeromq/libzmq#4841), or in
# the middle of a message (#3663).
LIBZMQ_FAULTS = "Assertion failed: !_io_error", "Assertion failed: !_more"

Tensors = dict[str, torch.Tensor]


class Fault(Enum):
    """What happens while ten versions are published."""

    KILL_LEAF = "kill -9 a leaf"
    KILL_INNER = "kill -9 an inner node"
    KILL_ROOT = "kill -9 the root"
    HANG = "stop a node for longer than the heartbeat"
    DAMAGE = "chunks that change on their way"
    LOSE = "records that get lost"
    CRAWL = "a node that sends slowly"
    DELETE = "the folder of an arriving version is deleted"
    FULL = "a full file system"
    DESERT = "a subscriber dies holding a pin"
    JOIN = "a node joins late"


def content_of(tensors: Tensors) -> str:
    """Digest of names and bits."""
    total = blake3()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.contiguous().view(torch.int16).numpy().tobytes())
    return total.hexdigest()


class Weights:
    """A model of some 50,000 bf16 elements in training, or `scale` times that.

    Mostly few elements move, sometimes all, sometimes its layout.
    """

    def __init__(self, rng: random.Random, *, scale: int) -> None:
        self._rng = rng
        self._scale = scale
        self.tensors: Tensors = {}
        self._all_new()

    def step(self) -> None:
        kind = self._rng.random()
        if kind < 0.1:
            self._all_new()
        elif kind < 0.95:  # the rest of them change nothing
            every = self._rng.choice([3, 30, 100, 1000])
            for name, tensor in self.tensors.items():
                bits = tensor.clone().view(torch.int16)
                bits[self._rng.randrange(every) :: every] += self._rng.choice([1, -1, 300])
                self.tensors[name] = bits.view(torch.bfloat16)

    def _all_new(self) -> None:
        generator = torch.Generator().manual_seed(self._rng.randrange(2**31))
        sizes = self._rng.choice([(30_000, 20_000), (30_000, 20_001), (50_000,)])
        self.tensors = {
            f"layer.{number}": torch.randn(self._scale * size, generator=generator).bfloat16()
            for number, size in enumerate(sizes)
        }


class Record:
    """What was published, known before anyone can have it."""

    def __init__(self) -> None:
        self.contents: dict[int, str] = {}
        self._published: dict[int, asyncio.Future[Published]] = {}

    def announce(self, version: int, tensors: Tensors) -> asyncio.Future[Published]:
        self.contents[version] = content_of(tensors)
        self._published[version] = asyncio.get_running_loop().create_future()
        return self._published[version]

    async def check(self, pulled: PulledVersion) -> None:
        """The law: every file is what was published, and so are the tensors in them."""
        assert pulled.version in self._published, f"version {pulled.version} was never published"
        published = await self._published[pulled.version]
        assert pulled.digest == published.digest, f"{pulled} is not {published}"
        files, tensors = _read(Path(pulled.path))
        assert files == published.digest, f"{pulled} has other files than {published}"
        assert content_of(tensors) == self.contents[pulled.version], f"{pulled} has other tensors"


def _read(folder: Path) -> tuple[str, Tensors]:
    """Digest of the files, made anew, and the tensors in them."""
    total, tensors = blake3(), {}
    for path in sorted(folder.glob("*.safetensors")):
        total.update(path.name.encode() + b"\0" + bytes.fromhex(digest(path)))
        tensors |= load_file(path)
    return total.hexdigest(), tensors


class Witness:
    """A subscriber that checks all that it pulls, when it gets it and again before it lets go."""

    def __init__(self, member: Member, record: Record, rng: random.Random) -> None:
        self.held: PulledVersion | None = None
        self.followed: list[int] = []  # versions that it made of changes
        self._member = member
        self._record = record
        self._rng = rng
        self._name = f"replica-of-{member.name}"

    async def live(self) -> None:
        """Until cancelled; at a later call as its revived self."""
        subscriber = Subscriber(self._member.endpoint, self._name, KEYS, heartbeat_s=HEARTBEAT_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(subscriber.run())
            try:
                await self._watch(subscriber)
            finally:
                await subscriber.close()

    async def _watch(self, subscriber: Subscriber) -> None:
        if self.held is not None:  # was held for its old self
            assert await subscriber.pull(self.held.version) == self.held
        seen = -1
        while True:
            try:
                seen = await subscriber.wait_newer(seen)
                if self.held is not None:
                    await self._record.check(self.held)
                    if self._rng.random() < 0.5:
                        await self._follow_by_changes(subscriber, self.held)
                older = seen - self._rng.randint(1, 4) if self._rng.random() < 0.15 else None
                self.held = None  # if it dies now, the hold may have moved to the new one or not
                self.held = await subscriber.pull(older if older in self._record.contents else None)
            except VersionLostError:  # an older one: ask again
                seen -= 1
            except RelayError:  # no room, for a version or for its pin
                await asyncio.sleep(HEARTBEAT_S)
                seen -= 1
            else:
                await self._record.check(self.held)
                seen = self.held.version

    async def _follow_by_changes(self, subscriber: Subscriber, held: PulledVersion) -> None:
        """As an engine that serves `held`: the changes, where there are some, make the newer version of it."""
        _, tensors = _read(Path(held.path))
        self.held = None  # the hold moves
        pulled = await subscriber.pull(base=held.version)
        for path in pulled.changes:
            apply_changes(path, tensors)
        if pulled.changes:
            self.followed.append(pulled.version)
            assert content_of(tensors) == self._record.contents[pulled.version], f"{pulled} has other changes"


class Fleet:
    """Nodes, their witnesses, and what may be done to them."""

    def __init__(self, folder: Path, rng: random.Random, group: asyncio.TaskGroup) -> None:
        self.folder = folder
        self.members: list[Member] = []
        self.witnesses: dict[str, Witness] = {}
        self.record = Record()
        self.down: set[str] = set()  # killed on purpose
        self.robbed: set[str] = set()  # their folder was deleted: they may die
        self.newest = -1
        self._rng = rng
        self._group = group
        self._lives: dict[str, asyncio.Task[None]] = {}

    async def add(self, parents: list[Member]) -> Member:
        """The next node, with a witness."""
        member = Member(
            self.folder,
            f"relay-{len(self.members)}",
            KEYS,
            [parent.endpoint for parent in parents],
            chunk_bytes=CHUNK,
            parent_timeout_s=HEARTBEAT_S,
            keep_versions=KEEP,
        )
        await asyncio.to_thread(member.start)
        self.witnesses[member.name] = Witness(member, self.record, self._rng)
        self.members.append(member)
        self.revive(member)
        return member

    def revive(self, member: Member) -> None:
        self._lives[member.name] = self._group.create_task(self.witnesses[member.name].live())

    async def desert(self, member: Member) -> None:
        self._lives[member.name].cancel()
        await asyncio.wait([self._lives[member.name]])

    async def keep(self) -> None:
        """Start again what died and should not have."""
        for member in self.members:
            if not member.alive and member.name not in self.down:
                excused = member.name in self.robbed or any(fault in member.last_words for fault in LIBZMQ_FAULTS)
                assert excused, f"{member.name} died: {member.last_words}"
                await asyncio.to_thread(member.start)

    async def rest(self, most_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0, most_s))

    async def kill(self, member: Member) -> None:
        self.down.add(member.name)
        await asyncio.to_thread(member.kill)
        await self.rest(4 * HEARTBEAT_S)
        await asyncio.to_thread(member.start)
        self.down.discard(member.name)

    async def hang(self, member: Member) -> None:
        member.signal(signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(1.5, 4) * HEARTBEAT_S)
        member.signal(signal.SIGCONT)

    async def misbehave(self, member: Member, mischief: Mischief) -> None:
        member.misbehave(mischief)
        await self.rest(1.0)
        member.misbehave(Mischief())

    async def delete_part(self, parent: Member) -> None:
        """Below a parent that sends slowly, so that there is something to delete."""
        parent.misbehave(Mischief(delay_s=0.005))
        for _ in range(100):
            parts = [part for member in self.members for part in member.store.glob("v*.part")]
            if parts:
                part = self._rng.choice(parts)
                self.robbed.add(part.parent.name)
                shutil.rmtree(part, ignore_errors=True)
                break
            await asyncio.sleep(0.01)
        parent.misbehave(Mischief())

    async def fill(self, store: Path) -> None:
        ballast = store / "ballast"
        await asyncio.to_thread(_fill, ballast)
        await self.rest(1.0)
        ballast.unlink()

    async def inflict(self, fault: Fault) -> None:
        """From beginning to end."""
        root, inner, leaves = self.members[0], self.members[1], self.members[2:]
        anyone = self._rng.choice(self.members)
        await self.rest(0.05)
        match fault:
            case Fault.KILL_LEAF:
                await self.kill(self._rng.choice(leaves))
            case Fault.KILL_INNER:
                await self.kill(inner)
            case Fault.KILL_ROOT:
                await self.kill(root)
            case Fault.HANG:
                await self.hang(anyone)
            case Fault.DAMAGE:
                flips = self._rng.choice([1, 2, 10, 300])
                await self.misbehave(self._rng.choice([root, inner]), Mischief(flips=flips))
            case Fault.LOSE:
                losses = self._rng.choice([1, 5, 50, 300])
                await self.misbehave(self._rng.choice([root, inner]), Mischief(losses=losses))
            case Fault.CRAWL:
                await self.misbehave(self._rng.choice([root, inner]), Mischief(delay_s=0.004))
            case Fault.DELETE:
                await self.delete_part(self._rng.choice([root, inner]))
            case Fault.FULL:
                await self.fill(self.folder / SMALL)
            case Fault.DESERT:
                await self.desert(anyone)
                await self.rest(1.0)
                self.revive(anyone)
            case Fault.JOIN:
                await self.add([anyone, root] if anyone is not root else [root])

    async def choose_tree(self, what: str, holds: Callable[[], dict[str, object]]) -> None:
        """Until nothing is left of what `holds` complains about."""
        try:
            async with asyncio.timeout(SETTLE_S):
                while holds():
                    await self.keep()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            words = "\n".join(f"--- {name}:\n{self._log(name)}" for name in holds())
            raise AssertionError(f"{what}: {holds()}\n{words}") from None

    def _log(self, name: str) -> str:
        return next(member.last_words for member in self.members if member.name == name)

    def behind(self) -> dict[str, object]:
        """Nodes whose subscriber does not hold the newest version."""
        held = {name: witness.held and witness.held.version for name, witness in self.witnesses.items()}
        return {name: version for name, version in held.items() if version != self.newest}

    def litter(self) -> dict[str, object]:
        """What lies in the stores and should not."""
        return {member.name: found for member in self.members if (found := _litter(member.store))}


def _litter(store: Path) -> set[str]:
    pins = {path.name: path.read_text() for path in store.glob("pin-*")}
    numbers = [*map(str, complete_versions(store)[-KEEP:]), *pins.values()]
    kept = {name for number in numbers for name in (f"v{number}", f"changes-{number}.safetensors")}
    return {path.name for path in store.iterdir()} - kept - pins.keys() - {SPARE, "spare-changes"}


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[bool]:
    """A file system of its own at `path`, if this user may mount one."""
    path.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "tmpfs", str(path)]
    mounted = sys.platform == "linux" and os.geteuid() == 0
    mounted = mounted and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


@asynccontextmanager
async def fleet(folder: Path, rng: random.Random, topology: Topology) -> AsyncIterator[Fleet]:
    """A tree of processes; killed at the end."""
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        ships = Fleet(folder, rng, group)
        try:
            for number in range(topology.num_nodes):
                await ships.add([ships.members[ancestor] for ancestor in topology.ancestors(number)])
            yield ships
        finally:
            for member in ships.members:
                await ships.desert(member)
                member.kill()
