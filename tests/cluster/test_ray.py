"""The thread that calls Ray."""

import asyncio
import threading

import pytest

from laminar_py.runtime.cluster import backend
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.part import Part
from tests.cluster.test_part import PATIENCE_S, Faulty
from tests.runs.fake_cluster import FakeCluster, joined


@pytest.fixture(scope="module")
def cluster():
    with joined(FakeCluster(0)):
        yield


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
