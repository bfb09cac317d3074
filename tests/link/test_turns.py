"""Turns and their answers, over real sockets: in order, whoever comes back, and from nobody else."""

import asyncio
import errno
import time
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import numpy as np

from laminar_py.records.codec import encode
from laminar_py.records.environment import EnvironmentTurn, ModelTurn, TurnPart
from laminar_py.relay.sockets import PeerClient, PeerServer, RelayKeys, SocketError, peer_sockets
from laminar_py.runtime.link import turns
from laminar_py.runtime.link.turns import AskedTurn, PartsFrame, TurnReceiver, TurnSender
from tests.environment.turns import problem

KEYS = RelayKeys.generate()
PATIENCE_S = 10.0
LOOPBACK = "127.0.0.1"


def part(place, *, name="g0.0"):
    ids = np.array([place], np.int32)
    return TurnPart(trajectory_id=name, turn_start=4, place=place, ids=ids, logprobs=np.zeros(1, np.float32))


def ignore(answer):
    pass


def asked(number, *, by="replica-0"):
    turn = ModelTurn(trajectory_id="g0.0", problem=problem(1), response_ids=np.zeros(0, np.int32), spans=())
    return AskedTurn(asker=by, number=number, turn=turn)


def answer(id, *, length=1):
    return EnvironmentTurn(ids=np.full(length, id, np.int32))


class Process:
    """A process of environments, and the places of what it has heard; `hear` may take its time."""

    def __init__(self, *, busy_s=0.0):
        self.places, self.frames = [], 0
        self._came = asyncio.Event()
        self._busy_s = busy_s
        self._receiver = TurnReceiver(KEYS, LOOPBACK)
        self.endpoint = self._receiver.endpoint
        self.answer = self._receiver.answer
        self.task = asyncio.create_task(self._receiver.run(self.hear))

    def hear(self, parts):
        self.frames += 1
        self.places += [one.place for one in parts]
        self._came.set()
        time.sleep(self._busy_s)

    async def heard(self, place):
        """Once it has heard of this place."""
        while place not in self.places:
            self._came.clear()
            await self._came.wait()

    async def end(self):
        self.task.cancel()
        await asyncio.wait([self.task])


@asynccontextmanager
async def sending(*processes, answered=ignore):
    """A sender that finds the first of these that runs; and the addresses that it was given."""
    wire, found = peer_sockets(KEYS), []

    async def find():
        found.append(next(process.endpoint for process in processes if not process.task.done()))
        return found[-1]

    sender = TurnSender(find, partial(PeerClient, wire, name="replica-0"), answered)
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
        for place in range(0, 100, 2):
            sender.send_parts([part(place), part(place + 1)])
            await asyncio.sleep(0.001)
        await process.heard(99)
        assert process.places == list(range(100))
        assert len(set(found)) == 1


async def test_an_answer_goes_back_to_who_asked_once_it_is_connected():
    process, answers = Process(), asyncio.Queue()
    async with sending(process, answered=answers.put_nowait) as (sender, _):
        process.answer(asked(1), answer(5))  # not yet
        sender.send_parts([part(0)])
        await process.heard(0)
        process.answer(asked(2, by="replica-1"), answer(6))
        process.answer(asked(3), answer(7, length=turns.LARGEST_ANSWER))
        process.answer(asked(4), answer(8))
        told = await answers.get()
        assert (told.number, told.turn.ids.tolist()) == (4, [8]), "the others come over Ray alone"
        assert answers.empty()


async def test_what_is_sampled_for_a_busy_process_gathers_in_the_replica():
    process = Process(busy_s=0.005)
    async with sending(process) as (sender, _):
        for place in range(1000):
            sender.send_parts([part(place)])
            await asyncio.sleep(0)
        await process.heard(999)
        assert process.places == list(range(1000))
        assert process.frames < 300, "all that waited came with the next frame"


async def test_one_that_comes_back_elsewhere_is_found():
    before, after = Process(), Process()
    async with sending(before, after) as (sender, found):
        sender.send_parts([part(0)])
        await before.heard(0)
        await before.end()
        place = 1
        while not after.places:
            sender.send_parts([part(place)])
            place += 1
            await asyncio.sleep(0.01)
        assert after.places == sorted(after.places)
        assert set(found) == {before.endpoint, after.endpoint}


async def test_a_connection_that_is_heard_no_more_is_made_anew(monkeypatch):
    process, answers = Process(), asyncio.Queue()
    async with sending(process, answered=answers.put_nowait) as (sender, found):
        sender.send_parts([part(0)])
        await process.heard(0)
        monkeypatch.setattr(sender._peer, "drain", fail)
        process.answer(asked(1), answer(5))  # by which it fails
        place = 1
        while len(found) < 2 or answers.empty():
            sender.send_parts([part(place)])
            place += 1
            await asyncio.sleep(0.001)
            if len(found) > 1:
                process.answer(asked(2), answer(6))
        assert (await answers.get()).number == 2


def fail(most):
    raise SocketError(errno.ENOTSOCK, "a mistake")


async def test_what_nobody_takes_in_time_is_let_go_of(monkeypatch):
    monkeypatch.setattr(turns, "AWAY_S", 0.1)
    wire, is_there = peer_sockets(KEYS), asyncio.Event()
    process = Process()

    async def find():
        await is_there.wait()
        return process.endpoint

    sender = TurnSender(find, partial(PeerClient, wire, name="replica-0"), ignore)
    async with asyncio.timeout(PATIENCE_S):
        sender.send_parts([part(0)])
        await sender._task
        is_there.set()
        sender.send_parts([part(1)])
        await process.heard(1)
    assert process.places == [1]
    sender.close()
    wire.close()
    await process.end()


async def test_one_that_says_nothing_of_what_came_is_told_no_more(monkeypatch):
    monkeypatch.setattr(turns, "AWAY_S", 100 * PATIENCE_S)
    post, wire = PeerServer(KEYS, LOOPBACK), peer_sockets(KEYS)

    async def find():
        return post.endpoint

    sender = TurnSender(find, partial(PeerClient, wire, name="replica-0"), ignore)
    async with asyncio.timeout(PATIENCE_S):
        for place in range(200):
            sender.send_parts([part(place)])
            await asyncio.sleep(0.001)
        frames = 0
        while frames < turns.MOST_AHEAD:
            await post.wait()
            frames += len(post.drain(1000))
        await asyncio.sleep(0.1)
        assert not post.drain(1000)
    sender.close()
    wire.close()
    post.close()


async def test_who_has_another_key_is_not_heard_and_no_parts_cost_nothing():
    process, stranger = Process(), peer_sockets(RelayKeys.generate())
    lists = PartsFrame(1, [msgspec.structs.replace(part(6), ids=[1, 2])])  # in the place of an array's bytes
    async with sending(process) as (sender, _):
        other = PeerClient(stranger, process.endpoint, "stranger")
        junk = PeerClient(peer := peer_sockets(KEYS), process.endpoint, "junk")
        for frame in (
            b"",
            b"\xc1",
            b"\x91\xff",
            encode(["no part"]),
            encode(lists),
            encode(PartsFrame(8, [part(5)])),
        ):
            while not junk.send(frame):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not other.send(encode(PartsFrame(1, [part(6)]))), "its connection was refused"
        await process.heard(5)
        sender.send_parts([part(7)])
        await process.heard(7)
        assert process.places == [5, 7]
        assert not process.task.done()
        for socket, wire in ((other, stranger), (junk, peer)):
            socket.close()
            wire.close()
