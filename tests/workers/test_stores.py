"""Stores on the nodes of a real Ray cluster: one a host, each of which comes back, until its host is gone."""

import asyncio
import os
import secrets
import signal
import socket
import time
from contextlib import asynccontextmanager, suppress

import psutil
import pytest

from laminar_py.config.loading import parse_config
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.fetch import StoreClient
from laminar_py.ledger.segments.frames import read_frame
from laminar_py.ledger.segments.salvage import Known, SalvageRequest, salvage
from laminar_py.ledger.segments.wire import ADDRESSES, find_address
from laminar_py.ledger.segments.writer import SegmentWriter
from laminar_py.records.codec import encode
from laminar_py.runtime.cluster.backend import nodes, on_node
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.placement import Needs, Placement
from laminar_py.runtime.workers import stores as stores_module
from laminar_py.runtime.workers.stores import Stores
from tests.runs.fake_cluster import FakeCluster, joined, wait_for_a_death
from tests.segments.pieces import random_piece
from tests.workers.fakes import make_incarnation

PATIENCE_S = 60.0
KEY = secrets.token_hex(32)


@pytest.fixture(scope="module")
def cluster():
    """Two hosts, of which the second dies in the last test."""
    with joined(two := FakeCluster(0, 1)):
        yield two


@pytest.fixture(autouse=True)
def _quick_to_notice(monkeypatch):
    monkeypatch.setattr(stores_module, "FOLLOW_S", 0.1)


def make_stores(folder, placement):
    (folder / "logs").mkdir(exist_ok=True)
    settings = {"name": "t", "steps": 1, "data": {"train": "t"}, "reward": {"use": ["t.py:t"]}}
    config = parse_config({**settings, "model": {"path": str(folder)}})
    incarnation = make_incarnation(config=config, run=RunFolder(folder), placement=placement)
    return Stores(incarnation, key=KEY)


@asynccontextmanager
async def kept(folder, placement):
    """Stores of this placement, up and watched."""
    stores = make_stores(folder, placement)
    async with asyncio.timeout(PATIENCE_S):
        stores.spawn()
        await stores.start()
        keeping = asyncio.create_task(stores.keep())
        try:
            yield stores
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
            for keeper in stores._keepers.values():
                keeper.kill()


def spread():
    return Placement(Needs(ranks=1, rank_gpus=0, replicas=2, replica_gpus=0), nodes)


def wait_for(title):
    """Processes of this title, as soon as there is one."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = [one for one in psutil.process_iter(["cmdline"], ad_value=()) if title in one.info["cmdline"]]
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"no {title} in {PATIENCE_S} s")


async def kill(stores, node):
    process = psutil.Process(await stores._keepers[node].parts[0].call("pid"))
    process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.wait)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
async def test_a_store_that_is_killed_comes_back_and_who_fetches_notices_nothing(tmp_path):
    placement = spread()
    async with kept(tmp_path, placement) as stores:
        hosts = [place.node for place in placement.plan.replicas]
        names = [stores.name_of(node) for node in hosts]
        assert len(set(names)) == 2
        piece = random_piece(tokens=3000)
        ref = SegmentWriter(RunFolder(tmp_path).segments, "replica-0-1-0").write(piece)
        client = StoreClient(bytes.fromhex(KEY), tmp_path / ADDRESSES)
        for name in names:
            assert read_frame(memoryview(client(name, [ref])[0]), ref.digest) == piece
        before = find_address(tmp_path / ADDRESSES, names[1])
        await kill(stores, hosts[1])
        with suppress(OSError), socket.create_server(before):  # it takes connections, and does not answer
            got = await asyncio.to_thread(client, names[1], [ref])
            assert read_frame(memoryview(got[0]), ref.digest) == piece
            assert await stores.bring_up(hosts[1]) == stores.name_of(hosts[1]) == names[1]
        client.close()


@pytest.mark.usefixtures("cluster")
async def test_a_run_on_one_host_has_no_store(tmp_path):
    placement = Placement(Needs(ranks=1, rank_gpus=0, replicas=2, replica_gpus=0), lambda: nodes()[:1])
    async with kept(tmp_path, placement) as stores:
        (node,) = placement.plan.nodes
        stores.require(node)
        assert (stores._keepers, stores.name_of(node)) == ({}, "")
        with pytest.raises(PartCrashedError, match="has none"):
            await stores.bring_up(node)


async def test_what_runs_on_a_host_ends_with_the_patience_of_who_asked(tmp_path, cluster):
    os.mkfifo(tmp_path / "replica-0-1-0.1.journal")  # stands for a disk that answers nothing: who opens it waits
    request = encode(SalvageRequest("*", "salvage-0", {"a": Known(1, 0)}))
    asked = asyncio.create_task(on_node(cluster.id_of(1), salvage, str(tmp_path), request))
    (process,) = await asyncio.to_thread(wait_for, "ray::salvage.answer")
    await asyncio.sleep(1)
    assert process.is_running()
    assert not asked.done()
    asked.cancel()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [process], PATIENCE_S)
    assert gone == [process]


@pytest.mark.usefixtures("cluster")
async def test_a_host_without_parts_has_a_store_as_soon_as_one_is_asked_for_also_before_they_are_kept(tmp_path):
    placement = spread()
    stores = make_stores(tmp_path, placement)
    node = placement.plan.replicas[1].node
    async with asyncio.timeout(PATIENCE_S):
        try:
            first, second = await asyncio.gather(stores.bring_up(node), stores.bring_up(node))
            assert first == second == stores.name_of(node) != ""
        finally:
            stores._keepers[node].kill()


async def test_a_store_ends_with_its_host_and_counts_no_more_deaths(tmp_path, cluster):
    placement = spread()
    async with kept(tmp_path, placement) as stores:
        lost = cluster.id_of(1)
        name = stores.name_of(lost)
        cluster.kill(1)
        await asyncio.to_thread(wait_for_a_death, 1)
        while lost in stores._keepers:
            await stores._changed.wait()
        assert stores.name_of(lost) == name, "readers are told that it is away"
        with pytest.raises(PartCrashedError, match="store-"):
            await stores.bring_up(lost)
