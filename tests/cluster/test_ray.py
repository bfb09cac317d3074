"""The thread that calls Ray."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
import ray

from laminar_py.children.hosted import LOG_BYTES
from laminar_py.runtime.cluster import backend
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.part import Part
from tests.cluster.test_part import PATIENCE_S, Faulty
from tests.runs.fake_cluster import FakeCluster, joined


class Printing:
    """Prints much."""

    def print_much(self):
        for _ in range(4 * LOG_BYTES // 60_000):
            os.write(1, b"noise\n" * 10_000)


def size_of_outputs():
    """Bytes that the workers of this process's cluster have written."""
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    return sum(file.stat().st_size for file in logs.glob("worker-*"))


@pytest.fixture(scope="module")
def cluster():
    with joined(FakeCluster(0)):
        yield


async def test_the_output_of_a_process_that_prints_much_is_bounded(cluster):
    await Part("part-0", Printing, concurrency=1, timeout_s=PATIENCE_S).call("print_much")
    assert 0 < size_of_outputs() < 2 * LOG_BYTES


async def test_nobody_waits_for_ray_and_it_hears_all_in_order(cluster):
    busy = threading.Event()
    backend.cluster()._calls.submit(busy.wait, PATIENCE_S)
    part = Part("part-0", Faulty, concurrency=1, timeout_s=PATIENCE_S)
    before = asyncio.create_task(part.call("answer"))
    await asyncio.sleep(0)
    part.kill()
    after = asyncio.create_task(part.call("answer"))
    await asyncio.sleep(0.1)
    assert not before.done()
    busy.set()
    with pytest.raises(PartCrashedError):
        await after
    await asyncio.wait([before])


async def test_a_call_that_nobody_waits_for_any_more_is_not_made(cluster):
    busy = threading.Event()
    part = Part("part-0", Faulty, concurrency=1, timeout_s=PATIENCE_S)
    assert await part.call("answer") == 1
    backend.cluster()._calls.submit(busy.wait, PATIENCE_S)
    vanishing = asyncio.create_task(part.call("vanish"))
    await asyncio.sleep(0)
    vanishing.cancel()
    await asyncio.wait([vanishing])
    busy.set()
    assert await part.call("answer") == 1
