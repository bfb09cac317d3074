"""The relay tree on the nodes of a real Ray cluster: one a host, and a root that moves when its host dies."""

import asyncio
import signal
from contextlib import asynccontextmanager
from types import SimpleNamespace

import psutil
import pytest
import torch

from laminar_py.ledger.run_folder import RunFolder
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.subscriber import Subscriber
from laminar_py.relay.tree import SMALLEST_CHUNK_BYTES
from laminar_py.runtime.cluster.backend import nodes
from laminar_py.runtime.cluster.errors import PartBugError, PartCrashedError, RemoteCallError
from laminar_py.runtime.cluster.placement import Needs, NodeSlot, Placement
from laminar_py.runtime.workers import relays as relays_module
from laminar_py.runtime.workers.relays import Relays
from tests.builders import make_config
from tests.runs.fake_cluster import FakeCluster, joined, wait_for_a_death
from tests.workers.fakes import make_incarnation

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def cluster():
    """Three hosts, of which the first outlives all tests; those that need one alone take that (`one_node`)."""
    with joined(three := FakeCluster(0, 1, 1)):
        yield three


def one_node():
    return nodes()[:1]


@pytest.fixture(autouse=True)
def _quick_to_notice(monkeypatch):
    monkeypatch.setattr(relays_module, "PING_S", 0.1)


def make_relays(folder, placement):
    config = make_config(model={"path": str(folder)}, relay={"shm": str(folder)})
    ledger = SimpleNamespace(append=lambda event: None)
    return Relays(make_incarnation(config=config, run=RunFolder(folder), placement=placement, ledger=ledger))


def prepare(folder):
    """A model's sizes, and room for logs."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1}')


@asynccontextmanager
async def kept(folder, placement):
    """Relays of this placement, up and watched."""
    prepare(folder)
    relays = make_relays(folder, placement)
    async with asyncio.timeout(PATIENCE_S):
        await relays.start()
        keeper = asyncio.create_task(relays.keep())
        try:
            yield relays
        finally:
            keeper.cancel()
            await asyncio.wait([keeper])


async def publish(relays, version):
    """What the learner does, on whichever host it is."""
    await relays.root_up()
    return await write(relays, version, chunk_bytes=relays.chunk_bytes)


async def write(relays, version, *, chunk_bytes):
    """Leave a version in the root's store; its digest."""
    publisher = Publisher(relays.store(0), chunk_bytes=chunk_bytes)
    tensors = [("weight", torch.full((64, 64), version))]
    await asyncio.to_thread(publisher.publish, version, tensors)
    await asyncio.to_thread(publisher.close)
    return publisher.completed(version).digest


async def test_versions_reach_every_host_also_after_the_death_of_the_host_of_the_root(tmp_path, cluster):
    placement = Placement(Needs(ranks=1, rank_gpus=1, replicas=2, replica_gpus=0), nodes)
    home = placement.plan.relays[0]
    async with kept(tmp_path, placement) as relays:
        endpoints = [await relays.attach(replica, placement.plan.replicas[replica]) for replica in (0, 1)]
        assert len({*endpoints, relays.root}) == 3, "one relay on each host"
        with pytest.raises(PartCrashedError, match="its node a-node-that-died is gone"):
            await relays.attach(0, NodeSlot("a-node-that-died"))
        subscriber = Subscriber(endpoints[1], "replica-1", relays.keys)
        listening = asyncio.create_task(subscriber.run())
        digest = await publish(relays, 0)
        assert (await subscriber.pull(0)).digest == digest
        cluster.kill(1 if cluster.id_of(1) == home else 2)
        await asyncio.to_thread(wait_for_a_death, 2)
        await placement.refresh()  # as the learner does, whose ranks died there
        root = await relays.root_up()
        assert placement.plan.relays[0] not in (None, home)
        assert root not in endpoints, "it has come up elsewhere"
        digest = await publish(relays, 1)
        assert await subscriber.wait_newer(0) == 1
        assert (await subscriber.pull(1)).digest == digest
        assert [manifest.version for manifest in await relays.published()][-1] == 1
        await subscriber.close()
        await listening


async def comes_back_elsewhere(relays, node):
    """A relay is killed, and is back at another port."""
    endpoint = relays._keepers[node].endpoint
    process = psutil.Process(await pid_of(relays, node))
    process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.wait)
    while relays._keepers[node].endpoint == endpoint:
        await relays._changed.wait()


async def pid_of(relays, node):
    return await relays._keepers[node].parts[0].call("pid")


@pytest.mark.usefixtures("cluster")
async def test_when_a_relay_comes_back_at_another_port_all_are_told_and_none_starts_anew(tmp_path):
    placement = Placement(Needs(ranks=1, rank_gpus=0, replicas=1, replica_gpus=0, relays=2), one_node)
    async with kept(tmp_path, placement) as relays:
        subscriber = Subscriber(await relays.attach(0, placement.plan.replicas[0]), "replica-0", relays.keys)
        listening = asyncio.create_task(subscriber.run())
        leaf = await pid_of(relays, 1)
        await comes_back_elsewhere(relays, 0)
        digest = await publish(relays, 0)
        assert (await subscriber.pull()).digest == digest
        assert await pid_of(relays, 1) == leaf
        root = await pid_of(relays, 0)
        await comes_back_elsewhere(relays, 1)
        subscriber.attach(relays.endpoint_for(0))
        digest = await publish(relays, 1)
        await subscriber.wait_newer(0)
        assert (await subscriber.pull()).digest == digest
        assert await pid_of(relays, 0) == root
        await subscriber.close()
        await listening


async def test_a_host_that_hangs_counts_like_one_that_died_when_versions_are_looked_for(
    tmp_path, monkeypatch, caplog
):
    async def on_node(host, function, *arguments):
        assert host == "a"
        if hangs:
            await asyncio.Event().wait()
        return function(*arguments)

    hangs = False
    monkeypatch.setattr(relays_module, "on_node", on_node)
    relays = make_relays(tmp_path, None)
    relays._keeper(0).host = "a"
    await write(relays, 0, chunk_bytes=SMALLEST_CHUNK_BYTES)
    assert [manifest.version for manifest in await relays.published()] == [0]
    monkeypatch.setattr(relays_module, "NODE_TIMEOUT_S", 0.2)
    hangs = True
    assert await relays.published() == []
    assert "relay-0: no answer in 0.2 s from node a" in caplog.text


async def test_a_mistake_of_ours_on_a_host_is_no_death_of_it(tmp_path, monkeypatch, caplog):
    async def on_node(host, function, *arguments):
        raise errors.pop(0)

    errors = [
        RemoteCallError("OSError: unreadable", is_bug=False),
        RemoteCallError("TypeError: planted", is_bug=True),
    ]
    monkeypatch.setattr(relays_module, "on_node", on_node)
    relays = make_relays(tmp_path, None)
    relays._keeper(0).host = "a"
    assert await relays.published() == []
    assert "relay-0: OSError: unreadable from node a; its versions are ignored" in caplog.text
    with pytest.raises(PartBugError, match="relay-0: TypeError: planted"):
        await relays.published()


@pytest.mark.usefixtures("cluster")
async def test_the_size_of_chunks_is_settled_once_and_none_smaller_comes_after_a_resume(tmp_path):
    placement = Placement(Needs(ranks=1, rank_gpus=0, replicas=1, replica_gpus=0, relays=2), one_node)
    await write(make_relays(tmp_path, placement), 0, chunk_bytes=4 * SMALLEST_CHUNK_BYTES)
    async with kept(tmp_path, placement) as relays:
        assert relays.chunk_bytes == 4 * SMALLEST_CHUNK_BYTES, "versions of before can still be carried"
        digest = await publish(relays, 1)
        subscriber = Subscriber(await relays.attach(0, placement.plan.replicas[0]), "replica-0", relays.keys)
        listening = asyncio.create_task(subscriber.run())
        await subscriber.wait_newer(0)
        assert (await subscriber.pull(1)).digest == digest
        await subscriber.close()
        await listening
    fresh = make_relays(tmp_path / "new", placement)
    prepare(tmp_path / "new")
    await fresh._choose_chunks()
    assert fresh.chunk_bytes == SMALLEST_CHUNK_BYTES, "of sizes that are as good"
