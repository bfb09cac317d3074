"""Turns and answers over real sockets: in order, after restarts and lost connections, and from nobody else."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import numpy as np
import pytest

from laminar_py.records.codec import encode
from laminar_py.records.environment import EnvironmentTurn, ModelTurn
from laminar_py.relay.sockets import PeerClient, generate_keys, peer_sockets
from laminar_py.runtime.link import turns
from laminar_py.runtime.link.turns import AskedTurn, RemoteEnvironments, TurnServer
from tests.environment.turns import problem

KEYS = generate_keys()
PATIENCE_S = 20.0
LOOPBACK = "127.0.0.1"
NAMES = [f"g{number}.0" for number in range(8)]


def turn(*ids, name="g0.0"):
    return ModelTurn(trajectory_id=name, problem=problem(1), response_ids=np.array(ids, np.int32), spans=())


class Process:
    """An environment process that answers a turn with its tokens, after `way_s`."""

    def __init__(self, run, index=0, *, way_s=0.0):
        self.names, self.forgotten, self.turns = [], [], 0
        self._came, self._way_s = asyncio.Event(), way_s
        server = TurnServer(KEYS, LOOPBACK, run_dir=run, index=index)
        self.task = asyncio.create_task(server.run(self))

    async def answer(self, asked):
        self.turns += 1
        self.names.append(asked.trajectory_id)
        await asyncio.sleep(self._way_s)
        return EnvironmentTurn(ids=asked.response_ids, elapsed_s=0.01)

    def forget(self, trajectory_ids):
        self.forgotten += trajectory_ids
        self._came.set()

    async def until(self, condition):
        while not condition():
            self._came.clear()
            await self._came.wait()

    async def end(self):
        self.task.cancel()
        await asyncio.wait([self.task])


@asynccontextmanager
async def environments(run, *processes, workers=1):
    """The environments of a replica, in processes that end with the test."""
    wire = peer_sockets(KEYS)
    found = RemoteEnvironments(run, workers, wire, "replica-0")
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield found
    finally:
        found.close()
        wire.close()
        for process in processes:
            await process.end()


async def test_the_time_of_an_answer_includes_its_way(tmp_path):
    async with environments(tmp_path, Process(tmp_path, way_s=0.2)) as remote:
        answers = await asyncio.gather(*(remote.answer(turn(number)) for number in range(20)))
        assert [answer.ids.tolist() for answer in answers] == [[number] for number in range(20)]
        assert all(answer.elapsed_s > 0.19 for answer in answers)


async def test_a_turn_waits_for_a_process_that_starts_later(tmp_path):
    async with environments(tmp_path) as remote:
        waiting = asyncio.create_task(remote.answer(turn(7)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        process = Process(tmp_path)
        assert (await waiting).ids.tolist() == [7]
        await process.end()


async def test_a_turn_goes_to_the_process_that_replaces_a_crashed_one(tmp_path):
    before = Process(tmp_path, way_s=PATIENCE_S)
    async with environments(tmp_path) as remote:
        waiting = asyncio.create_task(remote.answer(turn(7)))
        await asyncio.sleep(0.2)
        await before.end()
        after = Process(tmp_path)
        assert (await waiting).ids.tolist() == [7]
        assert (before.turns, after.turns) == (1, 1)
        await after.end()


async def test_a_turn_without_an_answer_is_sent_again_and_worked_on_once(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "RESEND_S", 0.1)
    monkeypatch.setattr(turns, "LOOK_S", 0.05)
    process = Process(tmp_path, way_s=0.5)
    async with environments(tmp_path, process) as remote:
        assert (await remote.answer(turn(7))).ids.tolist() == [7]
        assert process.turns == 1


async def test_a_cancelled_turn_leaves_nothing_behind(tmp_path):
    async with environments(tmp_path, Process(tmp_path, way_s=0.2)) as remote:
        waiting = asyncio.create_task(remote.answer(turn(7)))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert remote._links[0]._asked == {}
        assert (await remote.answer(turn(8))).ids.tolist() == [8]


async def test_an_error_of_the_host_ends_the_process_and_not_the_turn(tmp_path):
    before = Process(tmp_path)
    before.answer = fail
    async with environments(tmp_path) as remote:
        waiting = asyncio.create_task(remote.answer(turn(7)))
        with pytest.raises(ExceptionGroup) as raised:
            await before.task
        assert raised.group_contains(ValueError, match="a mistake of ours")
        after = Process(tmp_path)
        assert (await waiting).ids.tolist() == [7]
        await after.end()


async def fail(asked):
    raise ValueError("a mistake of ours")


async def test_each_process_has_the_trajectories_of_its_own(tmp_path):
    processes = [Process(tmp_path, 0), Process(tmp_path, 1)]
    async with environments(tmp_path, *processes, workers=2) as remote:
        for name in NAMES:
            await remote.answer(turn(1, name=name))
        assert sorted(processes[0].names + processes[1].names) == NAMES
        for name in NAMES:
            await remote.forget(name)
        for process in processes:
            await process.until(lambda one=process: len(one.forgotten) == one.turns)
            assert sorted(process.forgotten) == sorted(process.names)


async def test_a_missing_process_holds_up_no_turn_of_another(tmp_path):
    process = Process(tmp_path, 0)
    async with environments(tmp_path, process, workers=2) as remote:
        answers = [asyncio.create_task(remote.answer(turn(1, name=name))) for name in NAMES]
        await asyncio.sleep(0.5)
        assert sum(answer.done() for answer in answers) == len(process.names) < len(NAMES)
        for answer in answers:
            answer.cancel()


async def test_a_stranger_is_not_heard_and_damaged_frames_cost_nothing(tmp_path):
    process, stranger = Process(tmp_path), peer_sockets(generate_keys())
    lists = AskedTurn(1, msgspec.structs.replace(turn(6), response_ids=[1, 2]))  # in the place of an array's bytes
    async with environments(tmp_path, process) as remote:
        await remote.answer(turn(1))
        connect = partial(PeerClient, endpoint=remote._links[0]._endpoint)
        other = connect(stranger, name="stranger")
        junk = connect(peer := peer_sockets(KEYS), name="junk")
        for frame in (
            b"",
            b"\xc1",
            b"\x91\xff",
            encode(["no part"]),
            encode(lists),
            encode(AskedTurn(8, turn(5))),
        ):
            while not junk.send(frame):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not other.send(encode(AskedTurn(1, turn(6)))), "its connection was refused"
        await remote.answer(turn(7))
        async with asyncio.timeout(20):  # the valid turn of the other socket may come later
            while process.turns < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert process.turns == 3
        assert not process.task.done()
        for socket, wire in ((other, stranger), (junk, peer)):
            socket.close()
            wire.close()
