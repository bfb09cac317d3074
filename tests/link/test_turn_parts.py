"""Turns on their way to environments, over real sockets: in order, whoever comes back, and from nobody else."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from laminar_py.link.turn_parts import TurnPartReceiver, TurnPartSender
from laminar_py.records.codec import encode
from laminar_py.records.environment import TurnPart
from laminar_py.relay.wire.post import Peer, peer_wire
from laminar_py.relay.wire.transport import RelayKeys

KEYS = RelayKeys.generate()
PATIENCE_S = 10.0
LOOPBACK = "127.0.0.1"


def part(place, *, name="g0.0"):
    ids = np.array([place], np.int32)
    return TurnPart(trajectory_id=name, turn_start=4, place=place, ids=ids, logprobs=np.zeros(1, np.float32))


class Process:
    """A process of environments, and what it has heard."""

    def __init__(self):
        self.places = asyncio.Queue()
        self._receiver = TurnPartReceiver(KEYS, LOOPBACK)
        self.endpoint = self._receiver.endpoint
        self.task = asyncio.create_task(self._receiver.run(self.hear))

    def hear(self, parts):
        for one in parts:
            self.places.put_nowait(one.place)

    async def end(self):
        self.task.cancel()
        await asyncio.wait([self.task])


@asynccontextmanager
async def sending(*processes):
    """A sender whose process is, by turns, each of `processes`; and where it was looked for."""
    wire, found = peer_wire(KEYS), []

    async def find():
        found.append(processes[len(found)].endpoint)
        return found[-1]

    sender = TurnPartSender(find, partial(Peer, wire, name="replica-0"))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield sender, found
    finally:
        sender.close()
        wire.close()
        for process in processes:
            await process.end()


async def test_parts_come_in_order_by_one_connection():
    process = Process()
    async with sending(process) as (sender, found):
        assert not sender.offer([part(0)]), "nobody has looked for it yet"
        await sender.send([part(0)])
        assert all(sender.offer([part(place), part(place + 1)]) for place in range(1, 99, 2))
        assert [await process.places.get() for _ in range(99)] == list(range(99))
        assert len(found) == 1


async def test_one_that_comes_back_elsewhere_is_found():
    before, after = Process(), Process()
    async with sending(before, after) as (sender, found):
        await sender.send([part(0)])
        assert await before.places.get() == 0
        await before.end()
        while sender.offer([part(1)]):  # noqa: ASYNC110 (until it is known that the connection is gone)
            await asyncio.sleep(0.01)
        await sender.send([part(2)])
        assert await after.places.get() == 2
        assert found == [before.endpoint, after.endpoint]


async def test_who_has_another_key_is_not_heard_and_no_parts_cost_nothing():
    process, stranger = Process(), peer_wire(RelayKeys.generate())
    async with sending(process) as (sender, _):
        other = Peer(stranger, process.endpoint, "stranger")
        junk = Peer(peer := peer_wire(KEYS), process.endpoint, "junk")
        for frame in (b"", b"\xc1", b"\x91\xff", encode(["no part"]), encode([part(5)])):
            while not junk.send(frame):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not other.send(encode([part(6)])), "its connection was refused"
        assert await process.places.get() == 5
        await sender.send([part(7)])
        assert await process.places.get() == 7
        assert not process.task.done()
        for socket, wire in ((other, stranger), (junk, peer)):
            socket.close()
            wire.close()
