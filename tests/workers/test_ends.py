"""Processes of a run end with the Ray node that started them."""

import asyncio
import signal
import threading

import psutil
import pytest

from laminar_py.runtime.cluster.backend import open_cluster
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.workers.processes.replica import ReplicaActor
from laminar_py.runtime.workers.processes.setup import PartActor
from laminar_py.runtime.workers.processes.weights import WeightsActor

PATIENCE_S = 60.0


class StuckActor(PartActor):
    """A part with a thread that never ends, and for which the interpreter waits."""

    async def pid(self) -> int:
        threading.Thread(target=threading.Event().wait).start()
        return super().pid()


def parts(kind: type) -> list[Part]:
    """Two parts; Ray ends those that nobody refers to any more."""
    return [Part(f"part-{index}", kind, concurrency=4, timeout_s=PATIENCE_S) for index in range(2)]


async def processes(of: list[Part]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in await asyncio.gather(*(part.call("pid") for part in of))]


@pytest.mark.parametrize("kind", [ReplicaActor, WeightsActor], ids=["on-an-event-loop", "on-threads"])
def test_parts_of_a_node_that_was_killed_are_gone_even_one_that_hangs(kind):
    with open_cluster(None):
        held = parts(kind)
        running = asyncio.run(processes(held))
        running[0].send_signal(signal.SIGSTOP)  # it hangs, and never hears that its node is gone
        node = running[0].parent()
        assert node.name() == "raylet"
        node.kill()
        assert psutil.wait_procs(running, timeout=PATIENCE_S)[1] == []


def test_a_part_that_cannot_end_is_gone_with_its_node():
    with open_cluster(None):
        held = parts(StuckActor)
        process, _ = asyncio.run(processes(held))
        node = process.parent()
        process.terminate()  # as Ray does; its threads end, and the interpreter waits for ours
        with pytest.raises(psutil.TimeoutExpired):
            process.wait(3)
        node.kill()
        process.wait(PATIENCE_S)
