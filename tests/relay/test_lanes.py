"""Lanes, from both ends and by hand: who is let in, what a frame may be, and that a broken lane costs little."""

import asyncio
import errno
import os
import random
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import msgpack
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from laminar_py.config import ConfigError
from laminar_py.config.cluster import RelayConfig, Seal
from laminar_py.relay.frames import LaneError, Sealer
from laminar_py.relay.lanes import MAX_GREETED, LaneReader, ParentLanes, make_hello
from laminar_py.relay.mapped_file import MappedFile
from laminar_py.relay.messages import (
    Announce,
    Attach,
    Chunk,
    Fetch,
    Lanes,
    OpenLanes,
    Ticket,
    VersionComplete,
    VersionFailed,
)
from laminar_py.relay.stored_version import StoredVersion
from tests.relay.tree import (
    CHUNK,
    ByHand,
    Events,
    HandParent,
    Learner,
    below_hand,
    chain,
    fetch,
    folder_bytes,
    growing,
    make_node,
    receive,
    running,
    until,
    write_version,
)

FRAMES = 100_000
HEADER_BYTES, TAG_BYTES = 512, 16  # as docs/rooms/relay.md says


def ticket() -> Ticket:
    return Ticket(secrets.token_bytes(16), secrets.token_bytes(32), secrets.token_bytes(32))


def sealed(key: bytes, place: int, data: bytes, bound: bytes = b"") -> bytes:
    """A frame at its place on a lane, counted from 1, sealed by the library alone."""
    return AESGCM(key).encrypt(place.to_bytes(12, "big"), data, bound)


def make_header(chunk: Chunk) -> bytes:
    """The header of a chunk, unsealed."""
    fields = {key: getattr(chunk, key) for key in Chunk.__struct_fields__}
    record = msgpack.packb({"type": "chunk", **fields, "data": b""})
    return (struct.pack("!II", len(record), len(chunk.data)) + record).ljust(HEADER_BYTES, b"\0")


def frames(key: bytes, chunks: list[Chunk], *, first: int = 1) -> list[bytes]:
    """Header and body of each chunk, as a parent sends them from frame `first` on."""
    made = []
    for chunk in chunks:
        data = bytes(chunk.data)
        header = make_header(chunk)
        made += [sealed(key, first, header), sealed(key, first + 1, data, header)]
        first += 2
    return made


class LaneOfHand:
    """A parent by hand that also lets lanes in, at a port of its own."""

    def __init__(self, parent: HandParent, num_lanes: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._parent = parent
        self.tickets = tuple(ticket() for _ in range(num_lanes))

    async def admit(self) -> list[socket.socket]:
        """The lanes of the child, in the order of the tickets."""
        offer = Lanes(port=self._listener.getsockname()[1], sealed=True, tickets=self.tickets)
        self._parent.send(offer)
        loop, lanes = asyncio.get_running_loop(), {}
        for _ in self.tickets:
            lane, _ = await loop.sock_accept(self._listener)
            lane.setblocking(False)
            hello = await loop.sock_recv(lane, 64)
            held = next(one for one in self.tickets if hello[:16] == one.id)
            assert hello[16:] == AESGCM(held.hello_key).encrypt(
                (1).to_bytes(12, "big"), b"", b"laminar lane 1" + held.id
            )
            lanes[held.id] = lane
        self._listener.close()
        return [lanes[held.id] for held in self.tickets]


async def ended(lane: socket.socket) -> bool:
    """True once the other end has closed the lane; a test's patience ends it otherwise."""
    try:
        return await asyncio.get_running_loop().sock_recv(lane, 1) == b""
    except ConnectionResetError:
        return True


def chunks_of(version: StoredVersion) -> list[Chunk]:
    return [version.read_chunk(0, index) for index in range(version.manifest.num_chunks(0))]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Frames of the same six chunks as `own`, under other keys or of another version."""

    own: list[bytes]
    lane1: list[bytes]
    peer: list[bytes]
    version2: list[bytes]
    clear: list[bytes]


ATTACKS: dict[str, Callable[[Recorded], list[bytes]]] = {
    "replayed": lambda it: [*it.own[:2], *it.own[:2]],
    "reordered": lambda it: [*it.own[2:4], *it.own[:2]],
    "left out": lambda it: [*it.own[:2], *it.own[4:6]],
    "truncated": lambda it: [it.own[0], it.own[1][:-1], it.own[2]],
    "cut off": lambda it: [it.own[0], it.own[1][:-1]],
    "a header without its body": lambda it: [it.own[0], it.own[2], it.own[3]],
    "cross-version": lambda it: [it.version2[0], it.own[1]],
    "cross-chunk": lambda it: [it.own[0], it.own[3]],
    "cross-lane": lambda it: it.lane1,
    "cross-peer": lambda it: it.peer,
    "a bit of the header": lambda it: [bytes([it.own[0][0] ^ 1]), it.own[0][1:], it.own[1]],
    "a bit of the body": lambda it: [it.own[0], bytes([it.own[1][0] ^ 1]), it.own[1][1:]],
    "in clear": lambda it: it.clear,
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_chunk_that_is_not_in_its_place_ends_the_lanes_and_is_asked_for_again(
    tmp_path: Path, name: str
) -> None:
    version, other = (write_version(tmp_path / "origin", number, 6 * CHUNK) for number in (1, 2))
    async with ByHand() as hand:
        parent = hand.parent()
        node = make_node(tmp_path, "relay-1", parent.endpoint, lanes=2, emit=(events := Events()))
        async with running(node):
            assert (await parent.receive(OpenLanes)).count == 2
            await parent.receive(Attach)
            by_hand = LaneOfHand(parent, 2)
            lanes = await by_hand.admit()
            parent.send(Announce(version.manifest))
            await parent.receive(Fetch)
            first, second = (held.chunk_key for held in by_hand.tickets)
            recorded = Recorded(
                own=frames(first, chunks_of(version)),
                lane1=frames(second, chunks_of(version)),
                peer=frames(secrets.token_bytes(32), chunks_of(version)),
                version2=frames(first, chunks_of(other)),
                clear=[part for chunk in chunks_of(version) for part in (make_header(chunk), bytes(chunk.data))],
            )
            await asyncio.get_running_loop().sock_sendall(lanes[0], b"".join(ATTACKS[name](recorded)))
            if name == "cut off":
                lanes[0].shutdown(socket.SHUT_WR)
            assert await ended(lanes[0])
            assert await ended(lanes[1])
            await parent.receive(Attach)  # it says anew what it has
            parent.send(Announce(version.manifest))
            await parent.receive(Fetch)
            parent.send_all(version)
            await events.first(VersionComplete, version=1)
            for lane in lanes:
                lane.close()
    assert folder_bytes(tmp_path / "relay-1" / "v1") == folder_bytes(version.folder)
    assert not [event for event in events.seen if isinstance(event, VersionFailed)]


async def test_honest_frames_made_by_another_hand_are_taken(tmp_path: Path) -> None:
    version = write_version(tmp_path / "origin", 1, 6 * CHUNK - 5)
    async with ByHand() as hand:
        parent = hand.parent()
        node = make_node(tmp_path, "relay-1", parent.endpoint, lanes=2, emit=(events := Events()))
        async with running(node):
            await parent.receive(Attach)
            by_hand = LaneOfHand(parent, 2)
            lanes = await by_hand.admit()
            parent.send(Announce(version.manifest))
            await parent.receive(Fetch)
            for number, lane in enumerate(lanes):
                sent = frames(by_hand.tickets[number].chunk_key, chunks_of(version)[number::2])
                await asyncio.get_running_loop().sock_sendall(lane, b"".join(sent))
            await events.first(VersionComplete, version=1)
            for lane in lanes:
                lane.close()
    assert folder_bytes(tmp_path / "relay-1" / "v1") == folder_bytes(version.folder)


async def test_a_chunk_damaged_in_memory_before_it_was_sealed_is_asked_for_again(tmp_path: Path) -> None:
    version = write_version(tmp_path / "origin", 1, CHUNK)
    events = Events()
    async with below_hand(tmp_path, emit=events) as (parent, _):
        await parent.receive(Attach)
        by_hand = LaneOfHand(parent, 1)
        with closing((await by_hand.admit())[0]) as lane:
            parent.send(Announce(version.manifest))
            await parent.receive(Fetch)
            right = version.read_chunk(0, 0)
            wrong = Chunk(version=1, file=0, index=0, checksum=right.checksum, data=memoryview(bytes(CHUNK)))
            sent = frames(by_hand.tickets[0].chunk_key, [wrong, right])
            await asyncio.get_running_loop().sock_sendall(lane, sent[0] + sent[1])
            assert (await parent.receive(Fetch)).first_chunk == 0
            await asyncio.get_running_loop().sock_sendall(lane, sent[2] + sent[3])
            await events.first(VersionComplete, version=1)


def strangers(port: int, held: Ticket) -> Iterator[tuple[str, bytes]]:
    yield "junk", secrets.token_bytes(10_000)
    yield "nothing", b""
    yield "half a hello", make_hello(held)[:20]
    yield "a ticket of nobody", make_hello(ticket())
    yield "a ticket without its key", make_hello(Ticket(held.id, secrets.token_bytes(32), held.chunk_key))
    yield "zmtp", b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(50)


async def test_a_stranger_at_the_lanes_port_gets_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    version = write_version(tmp_path / "relay-0", 1, 3 * CHUNK)
    loop = asyncio.get_running_loop()
    async with ByHand() as hand, running(node := make_node(tmp_path, "relay-0")):
        child = await hand.child(node.endpoint)
        child.send(OpenLanes(1))
        offer = await receive(child, Lanes)
        with ExitStack() as stack:
            for name, hello in strangers(offer.port, offer.tickets[0]):
                stranger = stack.enter_context(closing(socket.create_connection(("127.0.0.1", offer.port))))
                stranger.setblocking(False)
                await loop.sock_sendall(stranger, hello)
                assert await ended(stranger), name
            lane = stack.enter_context(closing(socket.create_connection(("127.0.0.1", offer.port))))
            lane.setblocking(False)
            await loop.sock_sendall(lane, make_hello(offer.tickets[0]))
            again = stack.enter_context(closing(socket.create_connection(("127.0.0.1", offer.port))))
            again.setblocking(False)
            await loop.sock_sendall(again, make_hello(offer.tickets[0]))
            assert await ended(again), "a ticket admitted two lanes"
            await asyncio.sleep(0.2)
            child.send(Fetch(version=1, file=0, first_chunk=2, credits=1))
            came = b""
            head = HEADER_BYTES + TAG_BYTES
            while len(came) < head + CHUNK + TAG_BYTES:
                came += await loop.sock_recv(lane, 2**16)
            key = offer.tickets[0].chunk_key
            header = AESGCM(key).decrypt((1).to_bytes(12, "big"), came[:head], b"")
            record_bytes, data_bytes = struct.unpack_from("!II", header)
            record = msgpack.unpackb(header[8 : 8 + record_bytes])
            assert (record["version"], record["file"], record["index"], data_bytes) == (1, 0, 2, CHUNK)
            data = AESGCM(key).decrypt((2).to_bytes(12, "big"), came[head:], header)
            assert data == version.file_path(0).read_bytes()[2 * CHUNK :]


async def test_a_flood_of_silent_connections_keeps_no_child_from_its_version(tmp_path: Path) -> None:
    async with growing(tmp_path, chain(1)) as (root,), Learner(tmp_path) as learner, ByHand() as hand:
        probe = await hand.child(root.endpoint)
        probe.send(OpenLanes(1))
        port = (await receive(probe, Lanes)).port
        with ExitStack() as stack:
            for _ in range(3 * MAX_GREETED):
                silent = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port))
                stack.enter_context(closing(silent))
            node = make_node(tmp_path, "relay-1", root.endpoint, emit=(events := Events()))
            async with running(node):
                published = await learner.publish(1)
                assert (await events.first(VersionComplete, version=1)).digest == published.digest


async def test_of_connections_that_come_at_once_few_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *args, **kinds: create(*args, **kinds | {"backlog": 1000}))
    lanes = ParentLanes("127.0.0.1", sealed=True, max_queue=10)
    with closing(lanes), ExitStack() as stack:
        for _ in range(3 * MAX_GREETED):
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", lanes.port))))
        num_before = len(os.listdir("/proc/self/fd"))
        admitting = asyncio.create_task(lanes.run())
        num_open = []
        for _ in range(10 * MAX_GREETED):
            await asyncio.sleep(0)
            num_open.append(len(os.listdir("/proc/self/fd")) - num_before)
        admitting.cancel()
        await asyncio.wait([admitting])
    assert MAX_GREETED <= max(num_open) <= MAX_GREETED + 2


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
async def test_a_lane_whose_write_fails_gives_the_version_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write, lane_writes = MappedFile.write, list[object]()

    def fail_once(*written: object) -> None:
        if threading.current_thread().name == "lane-in":
            lane_writes.append(written)
            if len(lane_writes) == 3:
                raise OSError(number, os.strerror(number))
        write(*written)

    monkeypatch.setattr(MappedFile, "write", fail_once)
    events = Events()
    async with growing(tmp_path, chain(2), emit=events), Learner(tmp_path) as learner:
        async with asyncio.timeout(20.0):
            await until(lambda: "lane-out" in {thread.name for thread in threading.enumerate()})
            await learner.publish(1)
            failed = await events.first(VersionFailed, node="relay-1", version=1)
            assert ("Input/output" if number == errno.EIO else "relay.shm=") in failed.reason
            await learner.publish(2)
            await events.first(VersionComplete, node="relay-1", version=2)


async def test_chunks_come_as_control_records_until_lanes_are_open_and_after(tmp_path: Path) -> None:
    version = write_version(tmp_path / "relay-0", 1, 2 * CHUNK)
    async with ByHand() as hand, running(node := make_node(tmp_path, "relay-0")):
        child = await hand.child(node.endpoint)
        child.send(OpenLanes(1))
        offer = await receive(child, Lanes)
        assert (await fetch(child, version.manifest, 0)).index == 0
        with closing(socket.create_connection(("127.0.0.1", offer.port))) as lane:
            lane.sendall(make_hello(offer.tickets[0]))
            await asyncio.sleep(0.2)
            child.send(Fetch(version=1, file=0, first_chunk=1, credits=1))
            assert await asyncio.to_thread(lane.recv, 1)
        await asyncio.sleep(0.2)
        assert (await fetch(child, version.manifest, 1)).index == 1


async def test_lanes_that_break_all_the_time_cost_no_version(tmp_path: Path) -> None:
    """The root drops the child's lanes again and again while versions travel."""
    async with growing(tmp_path, chain(3), emit=(events := Events()), parent_timeout_s=0.1) as nodes:

        async def break_lanes() -> None:
            while True:
                await asyncio.sleep(0.01)
                for node in nodes[:2]:
                    lanes = node._downlink.lanes
                    assert lanes is not None
                    for child in list(lanes._children):
                        lanes.drop(child)

        breaking = asyncio.create_task(break_lanes())
        async with Learner(tmp_path) as learner:
            for number in range(1, 6):
                published = await learner.publish(number, 2**20)
                for name in ("relay-1", "relay-2"):
                    complete = await events.first(VersionComplete, version=number, node=name)
                    assert complete.digest == published.digest
        breaking.cancel()
    assert not [event for event in events.seen if isinstance(event, VersionFailed)]


@pytest.mark.parametrize("seal", Seal)
async def test_a_version_comes_down_a_chain_under_each_seal(tmp_path: Path, seal: Seal) -> None:
    async with growing(tmp_path, chain(3), emit=(events := Events()), seal=seal, lanes=2) as nodes:
        async with Learner(tmp_path) as learner:
            for number in (1, 2, 3):
                published = await learner.publish(number, 2**20 + number * 4096)
                complete = await events.first(VersionComplete, version=number, node="relay-2")
                assert complete.digest == published.digest
        has_lanes = nodes[0]._downlink.lanes is not None
        assert has_lanes == (seal is not Seal.CURVE)
    assert folder_bytes(tmp_path / "relay-2" / "v3") == folder_bytes(tmp_path / "relay-0" / "v3")


PUBLIC = ("0.0.0.0", "8.8.8.8", "172.32.0.1", "2001:db8::1", "example.org", "169.254.0.1")
PRIVATE = ("127.0.0.1", "localhost", "10.1.2.3", "172.16.0.1", "192.168.0.9", "::1", "fd00::1", "ipc:///tmp/relay")


@pytest.mark.parametrize("host", PUBLIC)
async def test_weights_do_not_cross_a_public_network_unsealed(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^relay\.seal=none: .*{host}.* set relay\.seal=aead"):
        await make_node(tmp_path, "relay-0", host=host, seal=Seal.NONE).start()
    with pytest.raises(ValueError, match=r"relay\.seal=none"):
        RelayConfig(seal=Seal.NONE, host=host)
    RelayConfig(host=host)


@pytest.mark.parametrize("host", PRIVATE)
def test_on_a_private_network_they_may(host: str) -> None:
    assert RelayConfig(seal=Seal.NONE, host=host).seal is Seal.NONE


def damaged(rng: random.Random, right: bytes) -> bytes:
    """Bytes that are not `right` at this place: bits that flipped, noise, a part of it, or more than it."""
    match rng.randrange(4):
        case 0:
            frame = bytearray(right)
            for _ in range(rng.randrange(1, 4)):
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            return bytes(frame)
        case 1:
            return rng.randbytes(len(right))
        case 2:
            return right[rng.randrange(1, len(right)) :] + rng.randbytes(len(right))
    place = rng.randrange(len(right))
    return right[:place] + rng.randbytes(len(right) - place)


def test_a_hundred_thousand_damaged_chunks_open_nothing() -> None:
    """Half of them have a damaged header, half a damaged body."""
    rng, key = random.Random(1), secrets.token_bytes(32)
    right = Chunk(version=1, file=0, index=0, checksum=bytes(32), data=memoryview(bytes(100)))
    header, body = frames(key, [right])
    for number in range(FRAMES):
        hostile = damaged(rng, header) + body if number % 2 else header + damaged(rng, body)
        if hostile[: len(header) + len(body)] == header + body:
            continue  # two flips of one bit
        left = memoryview(hostile)

        def fill(target: memoryview) -> None:
            nonlocal left
            if len(target) > len(left):
                raise ConnectionResetError
            target[:], left = left[: len(target)], left[len(target) :]

        with pytest.raises((LaneError, ConnectionResetError)):
            LaneReader(fill, Sealer(key), most_bytes=CHUNK).receive()[1].open()


@pytest.mark.parametrize("tampered", [False, True])
def test_a_body_that_nobody_opened_is_proven_before_the_next_frame(tampered: bool) -> None:
    key = secrets.token_bytes(32)
    chunks = [Chunk(version=1, file=0, index=i, checksum=bytes(32), data=memoryview(b"abc%d" % i)) for i in (0, 1)]
    sent = bytearray(b"".join(frames(key, chunks)))
    sent[len(frames(key, chunks)[0])] ^= tampered
    left = memoryview(sent)

    def fill(target: memoryview) -> None:
        nonlocal left
        target[:], left = left[: len(target)], left[len(target) :]

    reader = LaneReader(fill, Sealer(key), most_bytes=CHUNK)
    reader.receive()
    if tampered:
        with pytest.raises(LaneError):
            reader.receive()
    else:
        assert bytes(reader.receive()[1].open()) == b"abc1"


async def test_a_hundred_thousand_forged_hellos_open_no_lane() -> None:
    lanes = ParentLanes("127.0.0.1", sealed=True, max_queue=10)
    rng = random.Random(2)
    offer = lanes.offer(b"child", 2)
    right = [make_hello(held) for held in offer.tickets]
    for _ in range(FRAMES):
        hello = damaged(rng, rng.choice(right))[: len(right[0])]
        assert hello in right or lanes.admit(hello) is None
    assert [lanes.admit(hello) for hello in right] == [(b"child", held) for held in offer.tickets]
    assert [lanes.admit(hello) for hello in right] == [None, None]
    lanes.close()


def test_tickets_do_not_show_their_keys() -> None:
    held = ticket()
    assert str(held.chunk_key) not in repr(Lanes(port=1, sealed=True, tickets=(held,)))
