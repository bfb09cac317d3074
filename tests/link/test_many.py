"""Many connections on one hub, and a hub whose event loop stands still: replicas are in a thread of their own."""

import asyncio
import threading
import time
from collections import defaultdict
from contextlib import contextmanager

from laminar_py.records.codec import encode
from laminar_py.relay.sockets import PeerClient, peer_sockets
from laminar_py.runtime.link.messages import CallOff, ReportFrame
from laminar_py.runtime.link.replica_link import ReplicaLink
from tests.link.ends import KEYS, Commands, by_hand, make_report, serving

MANY = 1000
LIMIT_S = 200.0
A_WIRE = 500  # sockets of a context; libzmq has 1,023 at most
PATIENCE_S = 1.0  # of a hub


class Crowd:
    """Replicas on an event loop of their own, as in processes of their own."""

    def __init__(self, endpoint, labels, *, quiet_s):
        self.replicas = [Commands() for _ in labels]
        self._endpoint, self._labels, self._quiet_s = endpoint, labels, quiet_s
        self._end = None

    def report(self, number):
        """Have each make a report."""
        for replica in self.replicas:
            self.loop.call_soon_threadsafe(replica.reports.put_nowait, make_report(number))

    async def _live(self, runs):
        self.loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        wires = [peer_sockets(KEYS) for _ in range(0, len(self._labels), A_WIRE)]
        links = [
            ReplicaLink(
                PeerClient(wires[index // A_WIRE], self._endpoint, label),
                replica,
                attach=lambda relay: None,
                quiet_s=self._quiet_s,
            )
            for index, (label, replica) in enumerate(zip(self._labels, self.replicas, strict=True))
        ]
        tasks = [asyncio.create_task(link.run()) for link in links]
        runs.set()
        await self._end.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for wire in wires:
            wire.close()

    @contextmanager
    def living(self):
        runs = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._live(runs)))
        thread.start()
        runs.wait()
        try:
            yield self
        finally:
            self.loop.call_soon_threadsafe(self._end.set)
            thread.join()


async def test_a_hub_that_stood_still_does_not_take_its_replicas_for_silent():
    async with serving(heartbeat_timeout_s=PATIENCE_S) as desk:
        labels = [f"replica-{index}-1-{index}" for index in range(5)]
        connections = [desk.hub.open(label, index) for index, label in enumerate(labels)]
        with Crowd(desk.hub.endpoint, labels, quiet_s=0.1).living():
            await desk.until(lambda: all(connection.reports_received for connection in connections))
            for still_s in (3 * PATIENCE_S, 0.7 * PATIENCE_S, 0.4 * PATIENCE_S):
                time.sleep(still_s)  # noqa: ASYNC251
                await asyncio.sleep(0.3)
                assert not any(connection.lost.done() for connection in connections), still_s
        assert await connections[0].lost == "no report in supervisor.heartbeat_timeout_s=1 s"


async def test_a_thousand_lines_are_all_served_and_cost_little_while_nothing_is_said():
    async with serving(limit_s=LIMIT_S) as desk:
        labels = [f"replica-{index}-1-{index}" for index in range(MANY)]
        connections = [desk.hub.open(label, index) for index, label in enumerate(labels)]
        crowd = Crowd(desk.hub.endpoint, labels, quiet_s=LIMIT_S)
        with crowd.living():
            crowd.report(1)
            await desk.until(lambda: all(connection.reports_received for connection in connections))
            assert await _share(asyncio.sleep(2.0)) < 0.05
            for number in range(2, 6):
                crowd.report(number)
            for connection in connections:
                connection.send_command(CallOff(["x"]))
            await desk.until(lambda: sum(number > 0 for _, number in desk.taken) == 5 * MANY)
            while not all(replica.did for replica in crowd.replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert all(replica.did == [("call_off", "x")] for replica in crowd.replicas)
    taken = defaultdict(list)
    for label, number in desk.taken:
        taken[label] += [number] if number else []
    assert [taken[label] for label in labels] == [[1, 2, 3, 4, 5]] * MANY


async def _share(work):
    """Share of a core that this thread has while something is awaited."""
    cpu, began = time.thread_time(), time.monotonic()
    await work
    return (time.thread_time() - cpu) / (time.monotonic() - began)


async def test_one_that_speaks_without_end_does_not_keep_others_waiting():
    async with serving() as desk:
        desk.hub.open("loud", 0)
        desk.hub.open("low", 1)
        with by_hand(desk.hub.endpoint, "loud", "low") as (loud, low):
            for hand in (loud, low):
                await hand.report(1)
                await hand.told(1)
            for _ in range(50_000):
                loud.peer.send(encode(ReportFrame(number=1, commands_received=0, report=make_report(1))))
            for number in range(2, 12):
                await low.report(number)
                await low.told(number)
            assert desk.post.has_more, "the other still speaks"
