"""Processes of a run end with the process that started them, however that ends, even one that hangs."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from laminar_py.runtime.cluster.backend import open_cluster
from laminar_py.runtime.cluster.forked import SHARED, start_server
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.workers.processes.base import PartActor
from laminar_py.runtime.workers.processes.learner import WeightsActor
from laminar_py.runtime.workers.processes.replica import ReplicaActor
from tests.runs.fake_cluster import FakeCluster, joined

PATIENCE_S = 60.0
CLIENT = """
import asyncio
from laminar_py.runtime.cluster.backend import open_cluster
from tests.workers.test_ends import StuckActor, start_two

async def main():
    _, running = await start_two(StuckActor)
    print(*(process.pid for process in running), flush=True)
    await asyncio.Event().wait()

with open_cluster(None):
    asyncio.run(main())
"""


class StuckActor(PartActor):
    """A part with a thread that never ends, and for which the interpreter waits."""

    async def pid(self) -> int:
        threading.Thread(target=threading.Event().wait).start()
        return super().pid()


async def start_two(kind: type) -> tuple[list[Part], list[psutil.Process]]:
    """Two parts, and their processes; Ray ends parts without a reference."""
    parts = [Part(f"part-{index}", kind, concurrency=4, timeout_s=PATIENCE_S) for index in range(2)]
    return parts, [psutil.Process(pid) for pid in await asyncio.gather(*(part.call("pid") for part in parts))]


def gone(running: list[psutil.Process]) -> bool:
    return psutil.wait_procs(running, timeout=PATIENCE_S)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ReplicaActor, WeightsActor], ids=["on-an-event-loop", "on-threads"])
def test_parts_of_a_ray_node_that_was_killed_are_gone_even_one_that_hangs(kind):
    with joined(FakeCluster(0)):
        held, running = asyncio.run(start_two(kind))
        running[0].send_signal(signal.SIGSTOP)  # it hangs, and never hears that its node is gone
        node = running[0].parent()
        assert node.name() == "raylet"
        node.kill()
        assert gone(running)
        assert held


@pytest.mark.slow
def test_a_part_that_cannot_end_is_gone_with_its_ray_node():
    with joined(FakeCluster(0)):
        held, (process, _) = asyncio.run(start_two(StuckActor))
        node = process.parent()
        process.terminate()  # as Ray does; its threads end, and the interpreter waits for ours
        with pytest.raises(psutil.TimeoutExpired):
            process.wait(3)
        node.kill()
        process.wait(PATIENCE_S)
        assert held


@pytest.mark.parametrize("hangs", [False, True])
def test_forked_parts_are_gone_with_the_process_that_started_them(hangs):
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True)
    running = [psutil.Process(int(pid)) for pid in client.stdout.readline().split()]
    assert len(running) == 2
    if hangs:
        running[0].send_signal(signal.SIGSTOP)
    client.kill()
    assert gone(running)
    client.communicate()


def test_forked_parts_are_gone_with_their_cluster():
    with open_cluster(None):
        held, running = asyncio.run(start_two(StuckActor))
    assert not any(process.is_running() for process in running), "they are reaped, too"
    assert held


async def test_a_part_whose_fork_server_died_is_gone_and_the_next_one_has_another_server(monkeypatch):
    monkeypatch.delenv(SHARED)
    with open_cluster(None):
        held, running = await start_two(ReplicaActor)
        os.kill(running[0].ppid(), signal.SIGKILL)
        assert gone(running)
        others, running = await start_two(ReplicaActor)
        assert [process.is_running() for process in running] == [True, True]
        assert held
        assert others


def test_a_server_that_several_use_outlives_each_of_them(tmp_path, monkeypatch):
    server = start_server(tmp_path / "server")
    monkeypatch.setenv(SHARED, str(tmp_path / "server"))
    for _ in range(2):
        with open_cluster(None):
            assert len(asyncio.run(start_two(WeightsActor))[1]) == 2
    deadline = time.monotonic() + PATIENCE_S
    while psutil.Process(server.pid).children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert psutil.Process(server.pid).children() == [], "it reaps what it has forked"
    server.kill()
    server.wait()
