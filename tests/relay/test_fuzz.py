"""Frames from peers that hold the run's key and mean harm: the node lives, stays small, and accepts nothing.

Both sides of a node are attacked: its listener, by a child or subscriber, and its uplink, by a parent. A parent
that delivers all chunks of a version whose digests hold is none of these: whoever has the key may publish.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeAlias, get_args

import msgpack
import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from laminar_py.records import codec
from laminar_py.relay import messages as m
from laminar_py.relay.delta import encode
from laminar_py.relay.digests import chunk_checksum, delta_proof, version_digest
from laminar_py.relay.sockets import CONTROL_BYTES
from laminar_py.relay.stored_version import StoredVersion
from laminar_py.relay.subscriber import Subscriber
from tests.relay.delta_builders import Forgery
from tests.relay.faults import LIBZMQ_FAULTS
from tests.relay.fleet import Member
from tests.relay.forger import MARK, MAX_VERSION, Forger, packed
from tests.relay.tree import (
    CHUNK,
    KEYS,
    ByHand,
    Events,
    Learner,
    below_hand,
    digest,
    folder_bytes,
    make_node,
    running,
    write_version,
)

Kinds: TypeAlias = tuple[type, ...]
KINDS: Kinds = (*get_args(m.ToParent), *get_args(m.ToChild))  # what lanes carry: `test_lanes.py`
FRAMES, PER_KIND = 20_000, 100_000
SHARES = {"relay-0": 0.2, "relay-1": 0.3, "parent": 0.5}  # of the frames: to both listeners, and from a parent
MOST_GROWTH_BYTES = 64 * 2**20  # of a node's memory; it idles at about as much
GREED_BYTES = 16 * 2**20  # of it, for one child that does not read; honest ones have a window of 1 MiB here
PATIENCE_MS = 60_000
LIMIT_S = 600.0
REAL = MAX_VERSION  # number of the version that is published when all is over
ATTEMPTS = 4  # of an attack
CUTS = 2  # oversized frames: each costs the parent's timeout


@contextmanager
def raw_socket(kind: int, *, server: bool = False) -> Iterator["zmq.Socket[bytes]"]:
    """With the run's keys, and as impatient with a node that does not read or answer."""
    context = zmq.Context()
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndtimeo = socket.rcvtimeo = PATIENCE_MS
    socket.curve_publickey, socket.curve_secretkey = KEYS.public.encode(), KEYS.secret.encode()
    if server:
        socket.curve_server = True
        socket.set(zmq.ROUTER_MANDATORY, 1)
    else:
        socket.curve_serverkey = KEYS.public.encode()
    try:
        yield socket
    finally:
        context.destroy(linger=0)


def drain(socket: "zmq.Socket[bytes]") -> list[list[bytes]]:
    """All that has come."""
    came = []
    while socket.poll(0):
        came.append(socket.recv_multipart())
    return came


def attack_below(endpoint: str, messages: Iterable[list[bytes]]) -> None:
    """As one who connects to the node; returns when the node has dealt with all."""
    with raw_socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        for count, message in enumerate(messages):
            socket.send_multipart(message)
            if count % 100 == 0:
                drain(socket)
        socket.send(codec.encode(m.Pull(id=2**40, session=1, name="last", version=1)))
        while msgpack.unpackb(socket.recv_multipart()[0]).get("id") != 2**40:
            pass


def cut_off_below(endpoint: str) -> None:
    """A frame above the bound ends the connection; one below it does not."""
    with raw_socket(zmq.DEALER) as socket:
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(endpoint)
        for _ in range(20):
            socket.send(bytes(CONTROL_BYTES - 100))
        socket.send(codec.encode(m.Pull(id=1, session=1, name="large", version=1)))
        assert msgpack.unpackb(socket.recv_multipart()[0])["id"] == 1
        assert not monitor.poll(0)
        for _ in range(CUTS):
            socket.send(bytes(CONTROL_BYTES + 1))
            assert monitor.poll(PATIENCE_MS), "an oversized frame was let through"
            recv_monitor_message(monitor)
        socket.disable_monitor()


class Impostor:
    """A parent that means harm, for the one node that looks for a parent at its socket."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self.child = self._attached()

    def _attached(self) -> bytes:
        """The connection of a child that has just come."""
        while True:
            sender, frame = self._socket.recv_multipart()
            if msgpack.unpackb(frame)["type"] == "attach":
                return sender

    def attack(self, messages: Iterable[list[bytes]]) -> None:
        """Returns when the child has dealt with all."""
        for count, message in enumerate(messages):
            try:
                self._socket.send_multipart([self.child, *message])
            except zmq.ZMQError as error:  # the child broke off, and comes anew
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self.child = self._attached()
            if count % 100 == 0:
                drain(self._socket)
        drain(self._socket)
        there = m.Manifest(1, "", CHUNK, (m.FileEntry("a.safetensors", 1, "00" * 32),))  # the child declines
        self._socket.send_multipart([self.child, codec.encode(m.Announce(there))])
        while msgpack.unpackb(self._socket.recv_multipart()[1]) != {"type": "done", "version": 1}:
            pass

    def cut_off(self) -> None:
        """A frame above the bound ends the connection, and the child comes anew."""
        for _ in range(CUTS):
            self._socket.send_multipart([self.child, bytes(CHUNK + CONTROL_BYTES + 1)])
            self.child = self._attached()


def attack_above(endpoint: str, messages: Iterable[list[bytes]], *, cut_off: bool = False) -> None:
    """As the parent of the node that looks for it there."""
    with raw_socket(zmq.ROUTER, server=True) as socket:
        socket.bind(endpoint)
        impostor = Impostor(socket)
        impostor.attack(messages)
        if cut_off:
            impostor.cut_off()


def assert_small(member: Member, before: int, most: int = MOST_GROWTH_BYTES) -> None:
    """In memory, which was `before` bytes at first."""
    assert member.alive, f"{member.name} died: {member.last_words}"
    growth = member.rss_bytes - before
    assert growth < most, f"{member.name} grew by {growth / 2**20:.0f} MiB"


def assert_untouched(store: Path, origin: Path) -> None:
    """Both versions that were published, right in every bit, and nothing else but pins."""
    kept = {path.name for path in store.glob("v*")}
    assert kept == {"v1", f"v{REAL}"}
    for version in kept:
        assert folder_bytes(store / version) == folder_bytes(origin / version)
        files = StoredVersion.load(store / version).manifest.files
        assert [digest(store / version / entry.name) for entry in files] == [entry.digest for entry in files]


@asynccontextmanager
async def pulling(replica: Subscriber) -> AsyncIterator[None]:
    """Meanwhile an honest subscriber gets its answers, again and again."""

    async def ask() -> None:
        while True:
            async with asyncio.timeout(PATIENCE_MS / 1000):
                assert (await replica.pull(1)).version == 1
            await asyncio.sleep(0.1)

    asking = asyncio.create_task(ask())
    try:
        yield
        assert not asking.done(), asking.exception()
    finally:
        asking.cancel()


async def attack(root: Member, node: Member, num_frames: int, rng: random.Random, kinds: Kinds) -> None:
    """Both listeners, then the node's uplink while an impostor has the root's port, which the root gets back."""
    version = StoredVersion.load(root.store / "v1")
    below, above = (
        Forger(rng, [kind for kind in get_args(side) if kind in kinds], version)
        for side in (m.ToParent, m.ToChild)
    )
    before = {member.name: member.rss_bytes for member in (root, node)}
    for member in (root, node):
        num = int(SHARES[member.name] * num_frames)
        await asyncio.to_thread(attack_below, member.endpoint, below.frames(num))
        await asyncio.to_thread(cut_off_below, member.endpoint)
        assert_small(member, before[member.name])
    await asyncio.to_thread(root.kill)
    frames = above.frames(int(SHARES["parent"] * num_frames))
    await asyncio.to_thread(attack_above, root.endpoint, frames, cut_off=True)
    assert_small(node, before[node.name])
    await asyncio.to_thread(root.start)


async def survive(folder: Path, *, seed: int, num_frames: int, kinds: Kinds = KINDS) -> None:
    root = Member(folder, "relay-0", KEYS, chunk_bytes=CHUNK, parent_timeout_s=1.0)
    node = Member(folder, "relay-1", KEYS, [root.start()], chunk_bytes=CHUNK, parent_timeout_s=1.0)
    replica = Subscriber(node.start(), "honest", KEYS, heartbeat_s=1.0)
    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            group.create_task(replica.run())
            async with Learner(folder) as learner:
                await learner.publish(1)
                await replica.pull()
                async with pulling(replica):
                    await attack(root, node, num_frames, random.Random(seed), kinds)
                await learner.publish(REAL)
                async with asyncio.timeout(PATIENCE_MS / 1000):
                    assert await replica.wait_newer(1) == REAL
                    assert (await replica.pull()).version == REAL
            await replica.close()
        assert_untouched(node.store, root.store)
    except BaseException as error:
        error.add_note(node.last_words)
        raise
    finally:
        node.kill()
        root.kill()


async def survive_but_for_libzmq(folder: Path, *, seed: int, num_frames: int, kinds: Kinds = KINDS) -> None:
    """Once more where libzmq ended the node by a fault of its own."""
    for attempt in range(ATTEMPTS):
        try:
            (folder / str(attempt)).mkdir()
            await survive(folder / str(attempt), seed=seed, num_frames=num_frames, kinds=kinds)
        except Exception as error:
            is_known = any(fault in note for note in error.__notes__ for fault in LIBZMQ_FAULTS)
            if not is_known or attempt == ATTEMPTS - 1:
                raise
        else:
            return


@pytest.mark.parametrize("seed", [4])
async def test_twenty_thousand_hostile_frames_change_nothing(tmp_path: Path, seed: int) -> None:
    await survive_but_for_libzmq(tmp_path, seed=seed, num_frames=FRAMES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
async def test_nor_do_a_hundred_thousand_of_each_kind(tmp_path: Path, kind: type) -> None:
    await survive_but_for_libzmq(tmp_path, seed=4, num_frames=2 * PER_KIND, kinds=(kind,))


def nested(depth: int) -> bytes:
    """An attach with a field too many, which is lists in lists."""
    head = msgpack.packb({"type": "attach", "newest": 1, "beyond": None})
    return head[:-1] + b"\x91" * depth + b"\xc0"


BELOW = {
    "a name that is no text": [packed({"type": "release", "id": 1, "session": 1, "name": MARK})],
    "a type that is no text": [packed({"type": MARK, "newest": 1})],
    "lists in lists": [nested(100_000)],
    "no frame but the sender": [b""],
    "many frames": [b"a"] * 1000,
}


@pytest.mark.parametrize("message", BELOW.values(), ids=BELOW.keys())
async def test_a_node_outlives_from_below(tmp_path: Path, message: list[bytes]) -> None:
    write_version(tmp_path / "relay-0", 1, CHUNK)
    async with running(node := make_node(tmp_path, "relay-0")):
        await asyncio.to_thread(attack_below, node.endpoint, [message])


def announce(*files: m.FileEntry) -> list[bytes]:
    try:
        digest = version_digest(files)
    except ValueError:
        digest = "00" * 32
    return [codec.encode(m.Announce(m.Manifest(2, digest, CHUNK, files)))]


def free_endpoint() -> str:
    """Where nobody listens yet, of ports that the system hands out to no connection meanwhile."""
    with raw_socket(zmq.ROUTER, server=True) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1", min_port=20_000, max_port=30_000)
    return f"tcp://127.0.0.1:{port}"


ABOVE = {
    "two frames": [b"two", b"frames"],
    "a reason that is no text": [packed({"type": "failed", "version": 9, "reason": MARK})],
    "lists in lists": [nested(100_000)],
    "a digest that is no digest": announce(m.FileEntry("a.safetensors", CHUNK, "zz" * 32)),
    "a version without files": announce(),
    "the same name twice": announce(*[m.FileEntry("a.safetensors", CHUNK, "00" * 32)] * 2),
}


@pytest.mark.parametrize("message", ABOVE.values(), ids=ABOVE.keys())
async def test_a_node_outlives_from_above_and_takes_what_an_honest_parent_has(
    tmp_path: Path, message: list[bytes]
) -> None:
    write_version(tmp_path / "relay-1", 1, CHUNK)
    origin = write_version(tmp_path / "origin", REAL, CHUNK)
    async with ByHand() as hand:
        honest = hand.parent()
        endpoint = free_endpoint()
        node = make_node(tmp_path, "relay-1", endpoint, honest.endpoint, emit=(events := Events()))
        attacking = asyncio.create_task(asyncio.to_thread(attack_above, endpoint, [message]))
        async with running(node):
            await attacking
            await honest.receive(m.Attach)
            honest.send(m.Announce(origin.manifest))
            honest.send_all(origin)
            await events.first(m.VersionComplete, version=REAL)
    assert {path.name for path in (tmp_path / "relay-1").glob("v*")} == {"v1", f"v{REAL}"}


async def test_a_name_twice_in_a_version_never_makes_a_file_with_a_wrong_digest(tmp_path: Path) -> None:
    """The second file of that name is longer: what comes for it changes the first, which was right already."""
    short, long = (write_version(tmp_path / "origin", number, number * CHUNK) for number in (1, 2))
    files = (short.manifest.files[0], long.manifest.files[0])
    async with below_hand(tmp_path) as (parent, _):
        await parent.receive(m.Attach)
        parent.send(m.Announce(m.Manifest(3, version_digest(files), CHUNK, files)))
        parent.send(msgspec.structs.replace(short.read_chunk(0, 0), version=3))
        for index in range(2):
            parent.send(msgspec.structs.replace(long.read_chunk(0, index), version=3, file=1))
        parent.send(m.Announce(short.manifest))
        parent.send_all(short)
        while (await parent.receive(m.Done)).version != 3:
            pass
    for folder in (tmp_path / "relay-1").glob("v*[0-9]"):
        manifest = StoredVersion.load(folder).manifest
        assert [digest(folder / entry.name) for entry in manifest.files] == [f.digest for f in manifest.files]


def padded(content: bytes, blocks: int) -> bytes:
    """A zstd frame of up to 255 bytes with so many empty blocks in front."""
    last = (1 | len(content) << 3).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd" + bytes([0x20, len(content)]) + bytes(3 * blocks) + last + content


async def test_a_delta_longer_than_its_chunk_is_refused(tmp_path: Path) -> None:
    """Nodes keep deltas in memory to pass them on, so what they may take is bounded by the version's size."""
    base = write_version(tmp_path / "origin", 1, CHUNK)
    new = bytearray(base.chunk_data(0, 0))
    new[0] ^= 1
    (tmp_path / "new.safetensors").write_bytes(new)
    files = (msgspec.structs.replace(base.manifest.files[0], digest=digest(tmp_path / "new.safetensors")),)
    payload = encode(bytes(new), base.chunk_data(0, 0), width=4)
    assert payload is not None
    long = Forgery.of(payload).with_frame(0, padded(bytes(1), CHUNK)).bytes()
    events = Events()
    async with below_hand(tmp_path, emit=events) as (parent, _):
        await parent.receive(m.Attach)
        parent.send(m.Announce(base.manifest))
        parent.send_all(base)
        await events.first(m.VersionComplete, version=1)
        parent.send(m.Announce(m.Manifest(2, version_digest(files), CHUNK, files), base=1))
        right = m.Chunk(version=2, file=0, index=0, checksum=chunk_checksum(bytes(new)), base=1)
        for data in (long, payload):
            proof = delta_proof(base.manifest.digest, data)
            parent.send(msgspec.structs.replace(right, data=memoryview(data), proof=proof))
        event = await events.first(m.VersionComplete, version=2)
    assert event.wire_bytes == len(payload)


def wait_for(path: Path) -> None:
    for _ in range(PATIENCE_MS // 50):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not come")


async def test_a_child_that_asks_for_all_and_reads_nothing_costs_bounded_memory(tmp_path: Path) -> None:
    """Every answer that it asked for would else wait in the node."""
    write_version(tmp_path / "relay-0", 1, 512 * CHUNK)
    node = Member(tmp_path, "relay-0", KEYS, chunk_bytes=CHUNK, parent_timeout_s=1.0)
    endpoint, before = await asyncio.to_thread(node.start), node.rss_bytes
    try:
        with raw_socket(zmq.DEALER) as socket:
            socket.rcvhwm = 1
            socket.connect(endpoint)
            for _ in range(60):
                socket.send(codec.encode(m.Fetch(version=1, file=0, first_chunk=0, credits=2**62)))
            socket.send(codec.encode(m.Pull(id=1, session=1, name="greedy", version=1)))
            await asyncio.to_thread(wait_for, node.store / "pin-greedy")
            assert_small(node, before, GREED_BYTES)
    finally:
        node.kill()
