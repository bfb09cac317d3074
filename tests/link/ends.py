"""Both ends of a link on loopback: a hub and what it took in, replicas that do as a test says, peers by hand."""

import asyncio
import contextlib
import random
from contextlib import asynccontextmanager, contextmanager

import numpy as np

from laminar_py.records.codec import decode, encode
from laminar_py.records.engine import EngineStatus, SamplingParams
from laminar_py.records.replica import Assignment, ReplicaReport, Survey
from laminar_py.records.trajectory import Kind
from laminar_py.relay.sockets import PeerClient, PeerServer, generate_keys, peer_sockets
from laminar_py.runtime.link.hub import ReplicaHub
from laminar_py.runtime.link.messages import CommandFrame, ReportFrame
from laminar_py.runtime.link.replica_link import ReplicaLink

KEYS = generate_keys()
LOOPBACK = "127.0.0.1"
PATIENCE_S = 60.0  # of a test


def make_report(number=0, *, replica=0, version=0, loads=()):
    """One that is known by `generated`."""
    status = EngineStatus(running=0, waiting=0, kv_used=0, kv_capacity=1, version=version)
    return ReplicaReport(
        replica=replica, status=status, admissible=8, received=0, generated=number, loads=tuple(loads)
    )


def make_assignment(name, *, prompt=(1, 2)):
    return Assignment(
        trajectory_id=name,
        epoch=1,
        group_id="g0",
        kind=Kind.TRAIN,
        prompt_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(max_new_tokens=1),
    )


class Commands:
    """A replica that writes down what it does, and reports what a test has it report."""

    def __init__(self):
        self.did = []  # names of calls, and the first that they name
        self.reports = asyncio.Queue()
        self.end = None  # what it raises once all is told
        self.version = 0

    def start_assignments(self, assignments):
        self.did.append(("submit", assignments[0].trajectory_id))

    async def abort(self, trajectory_ids):
        self.did.append(("abort", trajectory_ids[0]))

    async def give_up(self, trajectory_ids):
        self.did.append(("give_up", trajectory_ids[0]))

    def call_off(self, names):
        self.did.append(("call_off", names[0]))

    async def stop(self, *, evaluations):
        self.did.append(("stop", evaluations))

    async def survey(self):
        return Survey(replica=0, version=self.version, slots=1, kv_used=0, kv_capacity=1, running=())

    def expect(self, version, trajectory_ids):
        self.did += [("expect", name) for name in trajectory_ids[:1]]
        return version == self.version

    def report_soon(self):
        self.reports.put_nowait(make_report())

    async def next_report(self, timeout_s):
        if self.end is not None and self.reports.empty():
            raise self.end
        try:
            async with asyncio.timeout(timeout_s):
                return await self.reports.get()
        except TimeoutError:
            return make_report()


class Desk:
    """A hub, and what it has taken in: labels of connections and numbers of reports."""

    def __init__(self, heartbeat_timeout_s):
        self.post = PeerServer(KEYS, LOOPBACK)
        self.hub = ReplicaHub(self.post, on_reports=self._take, heartbeat_timeout_s=heartbeat_timeout_s)
        self.taken = []
        self.may_take = asyncio.Event()
        self.may_take.set()
        self._news = asyncio.Event()

    async def _take(self, reports):
        await self.may_take.wait()
        self.taken += [(connection.label, report.generated) for connection, report in reports]
        self._news.set()

    def of(self, label):
        """Numbers of reports of one connection that were taken in."""
        return [number for name, number in self.taken if name == label and number]

    async def until(self, holds):
        """Once this is true of what was taken in."""
        while not holds():
            self._news.clear()
            await self._news.wait()


@asynccontextmanager
async def serving(*, heartbeat_timeout_s=PATIENCE_S, limit_s=PATIENCE_S):
    """A hub that serves."""
    async with asyncio.timeout(limit_s):
        desk = Desk(heartbeat_timeout_s)
        task = asyncio.create_task(desk.hub.run())
        try:
            yield desk
        finally:
            task.cancel()
            await asyncio.wait([task])
            desk.hub.end()
            if not task.cancelled():
                task.result()


@asynccontextmanager
async def linked(endpoint, label, replica, *, attach=None, quiet_s=PATIENCE_S):
    """The other end of a connection, of a scripted replica; what ends it is raised here."""
    wire = peer_sockets(KEYS)
    peer = PeerClient(wire, endpoint, label)
    link = ReplicaLink(peer, replica, attach=attach or (lambda relay: None), quiet_s=quiet_s)
    task = asyncio.create_task(link.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        wire.close()


class Hand:
    """A peer whose every frame a test sends and reads itself."""

    def __init__(self, wire, endpoint, label):
        self.peer = PeerClient(wire, endpoint, label)

    async def say(self, up):
        """Send a word, once there is a connection."""
        await self.send(encode(up))

    async def send(self, frame):
        while not self.peer.send(frame):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def report(self, number, *, commands_received=0, answers=()):
        await self.say(
            ReportFrame(
                number=number,
                commands_received=commands_received,
                report=make_report(number),
                answers=answers,
            )
        )

    async def down(self):
        """The next word of the hub."""
        return decode(CommandFrame, await self.peer.receive())

    async def commands(self):
        """Numbers of the commands in the next word that has any."""
        while not (down := await self.down()).commands:
            pass
        return list(range(down.first, down.first + len(down.commands)))

    async def told(self, number):
        """Once a report is told."""
        while (await self.down()).reports_received < number:
            pass

    async def hears_nothing(self, for_s):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                down = await self.down()
                raise AssertionError(f"heard {down}")


@contextmanager
def by_hand(endpoint, *labels, keys=KEYS):
    """Peers under these names."""
    wire = peer_sockets(keys)
    hands = [Hand(wire, endpoint, label) for label in labels]
    try:
        yield hands[0] if len(hands) == 1 else hands
    finally:
        for hand in hands:
            hand.peer.close()
        wire.close()


class Proxy:
    """A way to a port which is cut, held up or closed as a test says; bytes on the way are lost then."""

    def __init__(self, endpoint):
        self._port = int(endpoint.rpartition(":")[2])
        self._ways = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._is_open = True
        self.cuts = 0

    async def open(self):
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.endpoint = f"tcp://{LOOPBACK}:{port}"

    async def _serve(self, reader, writer):
        if not self._is_open:
            writer.transport.abort()
            return
        there = await asyncio.open_connection(LOOPBACK, self._port)
        way = (writer, there[1])
        self._ways.add(way)
        await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))
        self._ways.discard(way)
        self._break(way)

    async def _pass(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    def _break(self, way):
        for writer in way:
            writer.transport.abort()

    def cut(self):
        self.cuts += len(self._ways)
        for way in self._ways:
            self._break(way)

    async def hold(self, for_s):
        """Let nothing through for a while, and lose what came meanwhile."""
        self._flows.clear()
        await asyncio.sleep(for_s)
        self.cut()
        self._flows.set()

    async def shut(self, for_s):
        """Refuse whoever comes for a while."""
        self._is_open = False
        self.cut()
        await asyncio.sleep(for_s)
        self._is_open = True

    async def fail(self, rng: random.Random):
        """One of these faults."""
        match rng.randrange(3):
            case 0:
                self.cut()
            case 1:
                await self.hold(rng.uniform(0, 0.1))
            case 2:
                await self.shut(rng.uniform(0, 0.1))

    def close(self):
        self.cut()
        self._flows.set()
        self._server.close()


@asynccontextmanager
async def proxied(endpoint):
    """A proxy before this endpoint."""
    proxy = Proxy(endpoint)
    await proxy.open()
    try:
        yield proxy
    finally:
        proxy.close()
