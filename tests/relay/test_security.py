"""Who is let in, what a frame may be, and that a stranger can read every frame with plain MessagePack."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from laminar_py.records import codec
from laminar_py.relay.messages import Announce, Attach, Chunk, ParentLost, RelayKeys, Want
from laminar_py.relay.sockets import CONTROL_BYTES, generate_keys, to_frames
from tests.relay.tree import CHUNK, KEYS, ByHand, Events, below_hand, make_node, receive, running, write_version


@contextmanager
def raw_socket(kind: int, keys: RelayKeys | None = KEYS, *, server: bool = False) -> Iterator[zmq.asyncio.Socket]:
    """A bare socket with these keys (None: no CURVE); a client takes the run's public key for the server's."""
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    socket.linger = 0
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        if server:
            socket.curve_server = True
        else:
            socket.curve_serverkey = KEYS.public.encode()
    yield socket
    context.destroy()


async def told_until(socket: zmq.asyncio.Socket, endpoint: str, *last: int) -> int:
    """Connect, and return the first event of the socket's monitor that is among `last`."""
    monitor = socket.get_monitor_socket()
    socket.connect(endpoint)
    while True:
        event = (await recv_monitor_message(monitor))["event"]
        if event in last:
            socket.disable_monitor()
            monitor.close()
            return event


async def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    async with running(node := make_node(tmp_path, "relay-0")):
        with raw_socket(zmq.DEALER, generate_keys()) as stranger:
            end = await told_until(
                stranger, node.endpoint, zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_SUCCEEDED
            )
    assert end == zmq.EVENT_HANDSHAKE_FAILED_AUTH


async def test_a_client_without_curve_gets_nothing(tmp_path: Path) -> None:
    write_version(tmp_path / "relay-0", 1, CHUNK)
    async with running(node := make_node(tmp_path, "relay-0")):
        with raw_socket(zmq.DEALER, None) as plain:
            socket_told = told_until(plain, node.endpoint, zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
            assert await socket_told == zmq.EVENT_DISCONNECTED
            plain.send(msgpack.packb({"type": "attach", "newest": -1}))
            async with ByHand() as hand:
                await receive(await hand.child(node.endpoint), Announce)  # one of ours is answered meanwhile
            assert not await plain.poll(0)


async def test_an_impostor_without_the_secret_key_gets_no_child(tmp_path: Path) -> None:
    impostor_keys = RelayKeys(KEYS.public, generate_keys().secret)
    with raw_socket(zmq.ROUTER, impostor_keys, server=True) as impostor:
        impostor.bind("tcp://127.0.0.1:*")
        endpoint = impostor.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        async with ByHand() as hand:
            honest, events = hand.parent(), Events()
            node = make_node(tmp_path, "relay-1", endpoint, honest.endpoint, parent_timeout_s=0.3, emit=events)
            async with running(node):
                await honest.receive(Attach)
                assert events.seen == [ParentLost("relay-1", endpoint, honest.endpoint)]
                assert not await impostor.poll(0)


async def test_an_oversized_frame_ends_the_connection_and_not_the_node(tmp_path: Path) -> None:
    async with running(node := make_node(tmp_path, "relay-0")):
        with raw_socket(zmq.DEALER) as careless:
            careless.send(bytes(2 * CONTROL_BYTES))
            assert await told_until(careless, node.endpoint, zmq.EVENT_DISCONNECTED)
        write_version(tmp_path / "relay-0", 1, CHUNK)
        async with ByHand() as hand:
            child = await hand.child(node.endpoint)
            assert (await receive(child, Announce)).manifest.version == 1


async def test_an_oversized_frame_from_a_parent_makes_the_child_attach_anew(tmp_path: Path) -> None:
    async with below_hand(tmp_path, parent_timeout_s=0.3) as (parent, _):
        await parent.receive(Attach)
        parent.send(
            Chunk(
                version=1,
                file=0,
                index=0,
                checksum=bytes(32),
                data=memoryview(bytes(CHUNK + 2 * CONTROL_BYTES)),
            )
        )
        await parent.receive(Attach)


async def test_frames_that_are_no_records_are_dropped(tmp_path: Path) -> None:
    write_version(tmp_path / "relay-0", 1, CHUNK)
    async with running(node := make_node(tmp_path, "relay-0")):
        with raw_socket(zmq.DEALER) as careless:
            careless.connect(node.endpoint)
            for record in (
                {"type": "chunk"},
                {"type": "want", "version": -1},
                {"type": "release", "id": 1, "session": 1, "name": "../up"},
            ):
                await careless.send(msgpack.packb(record))
            await careless.send_multipart([b"two", b"frames"])
            await careless.send(b"\xc1")
            await careless.send(msgpack.packb({"type": "attach", "newest": -1}))
            assert msgpack.unpackb(await careless.recv())["type"] == "announce"
            assert not await careless.poll(0)


async def test_a_stranger_reads_all_that_a_node_sends_down(tmp_path: Path) -> None:
    version = write_version(tmp_path / "relay-0", 1, CHUNK + 10)
    async with running(node := make_node(tmp_path, "relay-0")):
        with raw_socket(zmq.DEALER) as stranger:
            stranger.connect(node.endpoint)

            async def ask(**record: object) -> dict[str, object]:
                await stranger.send(msgpack.packb(record))
                frame, *data = await stranger.recv_multipart()
                return {**msgpack.unpackb(frame), "data": b"".join(data)}

            manifest = (await ask(type="attach", newest=-1))["manifest"]
            assert manifest["digest"] == version.manifest.digest
            chunk = await ask(type="fetch", version=1, file=0, first_chunk=1, credits=1)
            assert chunk["data"] == version.file_path(0).read_bytes()[CHUNK:]
            assert (await ask(type="subscribe"))["type"] == "newest"
            pulled = await ask(type="pull", id=1, session=1, name="stranger", version=None)
            assert pulled["path"] == str(version.folder)
            assert (await ask(type="pull", id=2, session=1, name="stranger", version=9))["lost"] is True
            assert (await ask(type="want", version=9))["type"] == "lost"


async def test_a_stranger_reads_all_that_a_node_sends_up(tmp_path: Path) -> None:
    version = write_version(tmp_path / "origin", 1, 3 * CHUNK)
    with raw_socket(zmq.ROUTER, server=True) as parent:
        parent.bind("tcp://127.0.0.1:*")
        endpoint = parent.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        async with running(node := make_node(tmp_path, "relay-1", endpoint)):
            sender, frame = await parent.recv_multipart()
            assert msgpack.unpackb(frame) == {"type": "openlanes", "count": 1}
            assert msgpack.unpackb((await parent.recv_multipart())[1]) == {"type": "attach", "newest": -1}
            await parent.send_multipart([sender, codec.encode(Announce(version.manifest))])
            fetch = {"type": "fetch", "version": 1, "file": 0, "first_chunk": 0, "credits": 3, "base": None}
            assert msgpack.unpackb((await parent.recv_multipart())[1]) == fetch
            async with ByHand() as hand:
                (await hand.child(node.endpoint)).send(Want(1))
                want = {"type": "want", "version": 1, "arriving": True}
                assert msgpack.unpackb((await parent.recv_multipart())[1]) == want
                for index in range(3):
                    await parent.send_multipart([sender, *to_frames(version.read_chunk(0, index))])
                assert msgpack.unpackb((await parent.recv_multipart())[1]) == {"type": "done", "version": 1}


def test_keys_do_not_show_their_secret() -> None:
    assert KEYS.secret not in repr(KEYS)
