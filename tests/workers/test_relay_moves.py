"""Relays that move, or come up late, as the plan changes: who ends them, and who is told. Without processes."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

from laminar_py.records.codec import decode, encode
from laminar_py.relay.tree import SMALLEST_CHUNK_BYTES
from laminar_py.runtime.cluster.placement import NodeSlot, Plan
from laminar_py.runtime.workers import relays as relays_module
from laminar_py.runtime.workers.specs import RelaySpec
from tests.workers.fakes import Processes
from tests.workers.test_relays import make_relays

PATIENCE_S = 60.0


class Plans:
    """Stands for a `Placement` whose plan a test changes: a replica on each of these hosts, and a relay."""

    spread = True

    def __init__(self, *hosts):
        self.plan = Plan(learner=(), replicas=(), relays=())
        self.change(*hosts)

    def change(self, *hosts):
        places = tuple(NodeSlot(host) for host in hosts)
        self.plan = replace(self.plan, learner=places[:1], replicas=places, relays=hosts)

    def ip(self, node):
        return node

    async def refresh(self, *, age_s=0.0):
        await asyncio.sleep(0)


class Starts:
    """Actors of relays, each of which listens at a port of its own, and what they hear."""

    def __init__(self, monkeypatch):
        self.processes = Processes(monkeypatch, self._make)
        self.pinged = asyncio.Queue()  # names of relays and endpoints of their parents
        self._port = 0
        monkeypatch.setattr(relays_module, "PING_S", 0.01)

    def _make(self, name):
        self._port += 1
        return Relay(name, self._port, self.pinged)

    async def until_told(self, name, *parents):
        while await self.pinged.get() != (name, parents):
            pass


class Relay:
    """Stands for `RelayActor`."""

    def __init__(self, name, port, pinged):
        self._name, self._port, self._pinged = name, port, pinged

    def start(self, data):
        assert f"relay-{decode(RelaySpec, data).node}" == self._name
        return f"tcp://relay:{self._port}"

    def ping(self, parents, sources):
        self._pinged.put_nowait((self._name, decode(tuple[str, ...], parents)))
        return encode([])

    def pid(self):
        return self._port


@asynccontextmanager
async def chained(folder, plans):
    """Relays of these plans in a chain, up and watched."""

    async def choose_chunks():
        relays._chunk_bytes = SMALLEST_CHUNK_BYTES

    relays = make_relays(folder, plans)
    relays._choose_chunks = choose_chunks
    async with asyncio.timeout(PATIENCE_S):
        await relays.start()
        keeping = asyncio.create_task(relays.keep())
        try:
            yield relays
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])


async def test_a_root_whose_host_lives_is_ended_when_the_learner_has_moved_to_another(tmp_path, monkeypatch):
    starts, plans = Starts(monkeypatch), Plans("a")
    async with chained(tmp_path, plans) as relays:
        root, first = relays.root, await starts.processes.next()
        plans.change("c")
        assert await relays.root_up() != root
        second = await starts.processes.next()
        assert (first.is_dead, second.is_dead, second.place) == (True, False, NodeSlot("c"))


async def test_relays_below_one_that_comes_up_after_them_are_told_of_it(tmp_path, monkeypatch):
    starts, plans = Starts(monkeypatch), Plans("a")
    async with chained(tmp_path, plans) as relays:
        plans.change("a", "b", "c")
        last = await relays.attach(2, NodeSlot("c"))
        await starts.until_told("relay-2", relays.root)
        middle = await relays.attach(1, NodeSlot("b"))
        await starts.until_told("relay-2", middle, relays.root)
        assert len({relays.root, middle, last}) == 3


class Holder:
    """Stands for a `Subscriber` whose node is the last to come up."""

    def __init__(self, endpoint, name, keys):
        self.attached, self._granted, self._closed = asyncio.Queue(), asyncio.Event(), asyncio.Event()

    async def run(self):
        await self._closed.wait()

    def attach(self, endpoint):
        self.attached.put_nowait(endpoint)

    async def pull(self, version):
        await self._granted.wait()

    def grant(self):
        self._granted.set()

    async def close(self):
        self._closed.set()


async def test_a_version_is_held_by_the_root_wherever_that_comes_up_meanwhile(tmp_path, monkeypatch):
    def make(*arguments):
        made.append(Holder(*arguments))
        return made[-1]

    made = []
    monkeypatch.setattr(relays_module, "Subscriber", make)
    starts = Starts(monkeypatch)
    async with chained(tmp_path, Plans("a")) as relays:
        before = relays.root
        holding = asyncio.create_task(relays.hold(3))
        await starts.until_told("relay-0")
        (await starts.processes.next()).die()
        while relays.root == before:
            await relays._changed.wait()
        (holder,) = made
        while await holder.attached.get() != relays.root:
            pass
        holder.grant()
        await holding
