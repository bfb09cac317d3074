"""Builders of the relay tests: trees of real nodes on loopback, versions on disk, and parties driven by hand."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from laminar_py.records.weights import AT, TO, UNUSED, Published
from laminar_py.relay.digests import chunk_checksum, digest_of, version_digest
from laminar_py.relay.frames import ChunkBody
from laminar_py.relay.messages import Attach, Chunk, Downward, Fetch, FileEntry, Manifest, RelayEvent
from laminar_py.relay.node import RelayNode
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.sockets import Connection, LinkState, Listener, SocketFactory, generate_keys
from laminar_py.relay.stored_version import StoredVersion, describe_version
from laminar_py.relay.subscriber import Subscriber
from laminar_py.relay.tree import Topology, grow_tree

torch.set_num_threads(1)

KEYS = generate_keys()
CHUNK = 4096
PATIENCE_S = 30.0  # every wait of these tests ends here

Kind = TypeVar("Kind")
Tensors: TypeAlias = Sequence[tuple[str, torch.Tensor]]


class Party(Protocol):
    """A node or a subscriber."""

    async def run(self) -> None: ...
    async def close(self) -> None: ...


def chain(num_nodes: int) -> Topology:
    return grow_tree(num_nodes, fanout=1)


def binary(num_nodes: int) -> Topology:
    return grow_tree(num_nodes, fanout=2)


@dataclass
class Events:
    """Collects what nodes report, and lets a test wait for one report."""

    seen: list[RelayEvent] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, event: RelayEvent) -> None:
        self.seen.append(event)
        self._more.set()

    async def first(self, kind: type[Kind], **fields: object) -> Kind:
        while True:
            for event in self.seen:
                if isinstance(event, kind) and all(getattr(event, key) == want for key, want in fields.items()):
                    return event
            self._more.clear()
            await self._more.wait()


def put_chunk(arriving: StoredVersion, chunk: Chunk) -> None:
    """Write a full chunk, which was checked, into an arriving version."""
    assert arriving.write_chunk(chunk, ChunkBody(chunk.data))
    arriving.mark_present(chunk.file, chunk.index, chunk.checksum)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (a folder or a file)
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(*parties: Party) -> AsyncIterator[None]:
    """All of them at work; closed at the end."""
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for party in parties:
            if isinstance(party, RelayNode):
                await party.start()
            group.create_task(party.run())
        try:
            yield
        finally:
            for party in parties:
                await party.close()


def make_node(folder: Path, name: str, *parents: str, **settings: object) -> RelayNode:
    """A node with its own store below `folder`."""
    chosen = {"chunk_bytes": CHUNK, "parent_timeout_s": 1.0, "lanes": 1, **settings}
    return RelayNode(name, store=folder / name, keys=KEYS, parents=parents, **chosen)


@asynccontextmanager
async def growing(folder: Path, topology: Topology, **settings: object) -> AsyncIterator[list[RelayNode]]:
    """A whole tree; node i is called `relay-<i>`."""
    nodes: list[RelayNode] = []
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for number in range(topology.num_nodes):
            parents = [nodes[ancestor].endpoint for ancestor in topology.ancestors(number)]
            nodes.append(make_node(folder, f"relay-{number}", *parents, **settings))
            await nodes[-1].start()
            group.create_task(nodes[-1].run())
        try:
            yield nodes
        finally:
            for node in reversed(nodes):
                await node.close()


class Learner:
    """A publisher in a thread of its own: in a run it is in another process than the root."""

    def __init__(self, folder: Path, **settings: object) -> None:
        chosen = {"chunk_bytes": CHUNK, **settings}
        self.publisher = Publisher(folder / "relay-0", **chosen)

    async def __aenter__(self) -> "Learner":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.publisher.close)

    async def publish(self, version: int, num_bytes: int = 300_000) -> Published:
        def publish() -> Published:
            self.publisher.publish(version, tensors(version, num_bytes))
            return self.publisher.completed(version)

        return await asyncio.to_thread(publish)


def subscriber(node: RelayNode, name: str) -> Subscriber:
    return Subscriber(node.endpoint, name, KEYS, heartbeat_s=1.0)


def tensors(seed: int, num_bytes: int = 300_000) -> list[tuple[str, torch.Tensor]]:
    """Two bf16 tensors of about this size."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(num_bytes // 4, generator=generator).bfloat16()
    return [("model.embed.weight", half.reshape(-1, 4)), ("model.norm.weight", half + 1)]


def changed(given: Tensors, every: int, *, start: int = 0) -> list[tuple[str, torch.Tensor]]:
    """One in so many elements moves by one unit in the last place."""
    moved = []
    for name, tensor in given:
        bits = tensor.clone().view(torch.int16 if tensor.itemsize == 2 else torch.int32).reshape(-1)
        bits[start % every :: every] += 1
        moved.append((name, bits.view(tensor.dtype).reshape(tensor.shape)))
    return moved


async def publish(learner: Learner, version: int, given: Tensors) -> None:
    """Publish these tensors, and wait until the root may find them."""
    learner.publisher.publish(version, given)
    learner.publisher.completed(version)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in a version's files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def apply_changes(path: str | Path, served: dict[str, torch.Tensor]) -> tuple[int, int]:
    """What an engine does with a change file; each place in it must differ. Returns base and version."""
    bits = {2: torch.int16, 4: torch.int32}
    with safe_open(path, framework="pt") as file:
        names = {key.removesuffix(AT).removesuffix(TO) for key in file.keys() if not key.endswith(UNUSED)}  # noqa: SIM118
        for name in names:
            at, to = file.get_tensor(name + AT), file.get_tensor(name + TO)
            assert at.dtype == torch.int64
            assert to.dtype == served[name].dtype
            assert (at[1:] > at[:-1]).all(), "places do not ascend"
            flat = served[name].reshape(-1).view(bits[to.itemsize])
            assert (flat[at] != to.view(bits[to.itemsize])).all(), "it names an element that did not change"
            flat[at] = to.view(bits[to.itemsize])
        return int(file.metadata()["base"]), int(file.metadata()["version"])


def write_version(store: Path, version: int, *sizes: int) -> StoredVersion:
    """A complete version of random files of these sizes, as a publisher would leave it."""
    folder = store / f"v{version}.new"
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        (folder / f"model-{number}.safetensors").write_bytes(os.urandom(size))
    paths = sorted(folder.iterdir())
    checksums = [read_checksums(path, chunk_bytes=CHUNK) for path in paths]
    files = tuple(
        FileEntry(path.name, path.stat().st_size, digest_of(found))
        for path, found in zip(paths, checksums, strict=True)
    )
    describe_version(folder, Manifest(version, version_digest(files), CHUNK, files), checksums)
    return StoredVersion.load(folder.rename(store / f"v{version}"))


def digest(path: Path) -> str:
    """Digest of a file as a manifest has it."""
    return digest_of(read_checksums(path, chunk_bytes=CHUNK))


def read_checksums(path: Path, *, chunk_bytes: int) -> bytes:
    """Checksums of a file's chunks, from its content."""
    content = path.read_bytes()
    return b"".join(chunk_checksum(content[at : at + chunk_bytes]) for at in range(0, len(content), chunk_bytes))


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Content of all weight files in a folder."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


class ByHand:
    """A wire of our own: the test plays the parent or a child, record by record."""

    def __init__(self) -> None:
        self._factory = SocketFactory(KEYS, heartbeat_s=5.0)
        self._sockets: list[Listener | Connection] = []

    async def __aenter__(self) -> "ByHand":
        return self

    async def __aexit__(self, *exc: object) -> None:
        for socket in self._sockets:
            socket.close()
        self._factory.close()

    def parent(self) -> "HandParent":
        listener = self._factory.listen("127.0.0.1", 0, max_queue=1000)
        self._sockets.append(listener)
        return HandParent(listener)

    async def child(self, endpoint: str) -> Connection:
        """An attached child of the node at `endpoint`."""
        link = self._factory.connect(endpoint, max_frame_bytes=2**21)
        self._sockets.append(link)
        assert await link.receive() is LinkState.UP
        link.send(Attach(-1))
        return link


class HandParent:
    """A parent that sends what the test says; follows one child."""

    def __init__(self, listener: Listener) -> None:
        self.endpoint = listener.endpoint
        self._listener = listener
        self._child = b""

    async def receive(self, kind: type[Kind]) -> Kind:
        """The next record of this kind; others are passed over."""
        while True:
            self._child, message = await self._listener.receive()
            if isinstance(message, kind):
                return message

    def send(self, message: Downward) -> None:
        assert self._listener.send(self._child, message), "the child is gone"

    def send_chunk(self, stored: StoredVersion, index: int, file: int = 0) -> None:
        self.send(stored.read_chunk(file, index))

    def send_all(self, stored: StoredVersion) -> None:
        for file in range(len(stored.manifest.files)):
            for index in range(stored.manifest.num_chunks(file)):
                self.send_chunk(stored, index, file)


async def receive(link: Connection, kind: type[Kind]) -> Kind:
    """The next record of this kind at a child driven by hand; others are passed over."""
    while True:
        message = await link.receive(PATIENCE_S)
        assert message is not None, f"no {kind.__name__} came"
        if isinstance(message, kind):
            return message


async def fetch(link: Connection, manifest: Manifest, index: int, file: int = 0) -> Chunk:
    """One chunk, asked for by hand."""
    link.send(Fetch(version=manifest.version, file=file, first_chunk=index, credits=1))
    return await receive(link, Chunk)


@asynccontextmanager
async def below_hand(folder: Path, **options: object) -> AsyncIterator[tuple[HandParent, RelayNode]]:
    """A parent that the test plays, and the node relay-1 at work below it."""
    async with ByHand() as hand:
        parent = hand.parent()
        async with running(node := make_node(folder, "relay-1", parent.endpoint, **options)):
            yield parent, node
