"""A run on 64 hosts of which three are lost at once, with all they stored, and never come back.

The scheduler, the owners of replicas, stores and payload, the placement, files and ledger are the real ones; what
runs in processes is not, and Ray's tasks are calls. Nobody waits for what is gone: every step is made.
"""

import asyncio
import shutil
from types import SimpleNamespace

from laminar_lab.audit.queries import accounting
from laminar_lab.audit.verify import verify
from laminar_py.config.loading import load_config
from laminar_py.ledger import archive as archive_module
from laminar_py.ledger.recovery import recover
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.reader import PayloadReader, StoreAwayError, complete_all
from laminar_py.ledger.segments.writer import Journal, SegmentWriter
from laminar_py.observe.stats import Stats, Totals
from laminar_py.records.events import Consumed
from laminar_py.records.host import SystemClock
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, FinishReason
from laminar_py.runtime.cluster.errors import NoAnswerError
from laminar_py.runtime.cluster.placement import Needs, Node, Placement
from laminar_py.runtime.workers import payload as payload_module
from laminar_py.runtime.workers.incarnation import Supervisor
from laminar_py.runtime.workers.payload import PayloadHosts, restore_live
from laminar_py.runtime.workers.replicas import Replicas
from tests.control.fleet import Fleet, make_piece
from tests.ledger.runs import begin, checkpoint, consume, open_ledger
from tests.runs.runs import REPO
from tests.workers.fakes import Processes, make_incarnation

HOSTS, GROUPS, STEPS = 64, 32, 4
GONE = (5, 6, 41)
PATIENCE_S = 120.0


class Store:
    """What runs in a store's process."""

    def __init__(self, name):
        self._name = name

    def start(self, data):
        return f"{self._name}:1"

    async def watch(self, seconds):
        await asyncio.sleep(seconds)

    def pid(self):
        return 7


class Cluster:
    """Hosts with a folder each, and one replica on each; GPUs are what the plan needs, and no more."""

    def __init__(self, monkeypatch, path):
        self.path = path
        self.nodes = [make_node(host) for host in range(HOSTS)]
        self.processes = Processes(monkeypatch, Store)
        self._asked = ""  # the host that a call runs on
        monkeypatch.setattr(payload_module, "on_node", self._on_node)
        monkeypatch.setattr(archive_module, "segments_path", lambda run: self.folder(self._asked))

    def folder(self, node):
        return self.path / "hosts" / node

    def lose(self, hosts):
        """These die at once, with their disks."""
        gone = {make_node(host).id for host in hosts}
        self.nodes = [node for node in self.nodes if node.id not in gone]
        for node in gone:
            shutil.rmtree(self.folder(node), ignore_errors=True)

    def join(self, hosts):
        """Others come, with empty disks."""
        self.nodes += [make_node(host) for host in hosts]

    async def _on_node(self, node, function, *arguments, apart):
        await asyncio.sleep(0)
        if node not in {one.id for one in self.nodes}:
            raise NoAnswerError("the node died")
        self._asked = node
        run = str(RunFolder(self.path).segments)
        return function(*(str(self.folder(node)) if one == run else one for one in arguments))


def make_node(host):
    return Node(id=f"h{host:02}", ip=f"10.0.0.{host}", gpus=1 + (host == 0), cpus=8, here=host == 0)


class Incarnation:
    """A controller of that run, and its replicas, which write to the folders of their hosts."""

    def __init__(self, cluster, ledger, *, number=1):
        config = load_config(REPO / "configs/quickstart.yaml", [f"rollout.replicas={HOSTS}"])
        needs = Needs(ranks=1, rank_gpus=1, replicas=HOSTS, replica_gpus=1)
        self.cluster, self.ledger = cluster, ledger
        self.placement = Placement(needs, lambda: list(cluster.nodes))
        self.fleet = Fleet(
            replicas=HOSTS, group_size=4, batch=GROUPS, capacity=3 * GROUPS, batch_per_replica=4, recorder=ledger
        )
        incarnation = make_incarnation(
            config=config,
            run=RunFolder(cluster.path),
            ledger=ledger,
            placement=self.placement,
            supervisor=Supervisor(record=lambda event: None, max_restarts=9),
            stats=Stats(SystemClock(), replicas=HOSTS, totals=Totals()),
            number=number,
        )
        self.payload = PayloadHosts(incarnation)
        self.replicas = Replicas(
            incarnation,
            scheduler=self.fleet.scheduler,
            relays=SimpleNamespace(),
            payload=self.payload,
            issuing=None,
            on_reports=None,
        )
        self.alive = list(range(HOSTS))

    async def start(self):
        """Have each replica's label, and its segments in the folder of its host."""
        self.payload.stores.spawn()
        await self.payload.stores.start()
        for index in range(HOSTS):
            await self.begin(index)

    async def begin(self, index):
        node = self.node_of(index)
        label = await self.payload.new_label(f"replica-{index}", node)
        self.replicas._keepers[index].label = label
        self.fleet.writers[index] = SegmentWriter(self.cluster.folder(node), label)

    def node_of(self, index):
        return self.placement.plan.replicas[index].node

    def note(self, index):
        """What a replica has begun gets two tokens, in its journal."""
        pieces = [
            make_piece(item, item.length, item.length + 2, (Span(0, item.length, item.length + 2),))
            for item in self.fleet.running[index].values()
        ]
        Journal(self.cluster.folder(self.node_of(index)), self.replicas._keepers[index].label).write(pieces)

    async def die(self, gone):
        """Hosts are lost; their keepers notice all at the same time."""
        indices = [index for index in self.alive if self.node_of(index) in {make_node(host).id for host in gone}]
        self.cluster.lose(gone)
        self.alive = [index for index in self.alive if index not in indices]
        await asyncio.gather(*(self.replicas._keepers[index].take_over() for index in indices))
        self.replicas.update_places()
        for index in indices:
            self.fleet.running[index].clear()
        return indices

    async def make_steps(self, first, last):
        """Steps with what the replicas that live generate; what the learner cannot read is told."""
        for step in range(first, last + 1):
            batch = await self._next_batch()
            while lost := self._fetch(batch):
                await self.fleet.scheduler.consumption.put_back(batch)
                await self.fleet.scheduler.lost_tokens.drop_trajectories(lost)
                batch = await self._next_batch()
            await self.fleet.scheduler.consumption.commit(batch, step)
            done = consume(step, batch.version, *(one.id for one in batch.trajectories))
            self.ledger.append_all([event for event in done if not isinstance(event, Consumed)])
            await self.ledger.commit()
            self.fleet.scheduler.admit()

    async def _next_batch(self):
        scheduler = self.fleet.scheduler
        for _ in range(50):
            if len(scheduler.consumption.buffer) >= GROUPS:
                break
            for index in self.alive:
                await self.fleet.report(index, admissible=4 - len(self.fleet.running[index]))
                await self.fleet.finish_all(index, admissible=4)
            await self.fleet.score_all()
            await scheduler.enforce_deadlines()
        return await asyncio.wait_for(scheduler.next_batch(groups=GROUPS, version=0), 5)

    def _fetch(self, batch):
        """What the learner, on the first host, cannot read of a batch."""
        refs = [ref for one in batch.trajectories for ref in one.refs]
        stores = self.payload.stores_for(refs, make_node(0).id)
        reader = PayloadReader(self.cluster.folder(make_node(0).id), fetch=self._fetch_pieces)
        return complete_all(batch.trajectories, reader, stores=stores)[1]

    def _fetch_pieces(self, address, refs):
        """Stands for stores and their client: the files of the host whose store has that address."""
        node = next(one for one, known in self.payload.stores._names.items() if known == address)
        if not self.cluster.folder(node).is_dir():
            raise StoreAwayError(f"{address} is away")
        found = []
        for ref in refs:
            with (self.cluster.folder(node) / f"{ref.segment}.segment").open("rb") as file:
                file.seek(ref.offset)
                found.append(file.read(ref.num_bytes))
        return found


def ids_of(hosts):
    return {make_node(host).id for host in hosts}


def assert_whole(cluster):
    """The record holds with what lies on all hosts that are left, and something was lost by name."""
    there = RunFolder(cluster.path).segments
    for node in cluster.nodes:
        if cluster.folder(node.id).is_dir():
            shutil.copytree(cluster.folder(node.id), there, dirs_exist_ok=True)
    assert verify(cluster.path) == []
    account = accounting(cluster.path)
    assert account.balanced
    assert account.train.dropped[DropReason.HOST_LOST] > 0


async def in_the_midst(run):
    """Everybody has something; some of it waits for another replica or for its score, with tokens on record."""
    fleet = run.fleet
    for index in run.alive:
        await fleet.report(index, admissible=4 - len(fleet.running[index]))
    for index in run.alive:
        names = list(fleet.running[index])
        for name in names[:1]:
            await fleet.finish(index, name, reason=FinishReason.ABORT, admissible=0)
        for name in names[1:2]:
            await fleet.finish(index, name, admissible=0)
        run.note(index)
    return {index: len(fleet.running[index]) for index in run.alive}


async def assert_nobody_waits_for(run, indices, hosts):
    views = run.fleet.scheduler.views.by_index
    assert not [index for index in indices if views[index].in_flight]
    await run.payload.archive(STEPS - 1, run.fleet.scheduler)
    needed = {run.payload._node_of(segment) for segment in await run.ledger.segments()}
    assert needed.isdisjoint(ids_of(hosts)), "nothing that is lost is thought to be there"


async def test_three_hosts_of_64_are_lost_at_once_and_every_step_is_made_by_the_others(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    async with asyncio.timeout(PATIENCE_S), open_ledger(tmp_path) as ledger:
        begin(ledger)
        run = Incarnation(cluster, ledger)
        await run.start()
        await run.make_steps(1, 1)
        held = await in_the_midst(run)
        indices = await run.die(GONE)
        assert len(indices) == len(GONE)
        assert any(held[index] for index in indices)
        assert not any(run.fleet.scheduler.views.by_index[index].has_place for index in indices)
        await run.make_steps(2, STEPS)
        await assert_nobody_waits_for(run, indices, GONE)
    assert_whole(cluster)


async def test_parts_that_die_with_their_host_lose_it_once(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    async with asyncio.timeout(PATIENCE_S), open_ledger(tmp_path) as ledger:
        begin(ledger)
        run = Incarnation(cluster, ledger)
        await run.start()
        await run.make_steps(1, 1)
        ledger.append(checkpoint(1, 0))
        label = run.replicas._keepers[GONE[0]].label
        scheduler, told, lose = run.fleet.scheduler, [], ledger.record_lost_pieces

        async def note(numbers, reason):
            told.append(list(numbers))
            await lose(numbers, reason)

        monkeypatch.setattr(ledger, "record_lost_pieces", note)
        cluster.lose(GONE[:1])
        assert await run.payload.is_lost(label)
        await asyncio.gather(*(run.payload.lose_host_of(label, scheduler) for _ in range(8)))
        assert len(told) == 1
        assert told[0]
        await run.payload.lose_host_of(label, scheduler)
        assert len(told) == 1, "nothing is left to lose"


async def test_a_run_of_64_hosts_is_resumed_where_three_of_them_never_come_back(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    async with asyncio.timeout(PATIENCE_S):
        async with open_ledger(tmp_path) as ledger:
            begin(ledger)
            run = Incarnation(cluster, ledger)
            await run.start()
            await run.make_steps(1, 1)
            ledger.append(checkpoint(1, 0))
            await in_the_midst(run)
        cluster.lose(GONE)
        cluster.join(range(HOSTS, HOSTS + len(GONE) + 1))  # the last has nothing to do
        recovered = recover(tmp_path)
        async with open_ledger(tmp_path) as ledger:
            begin(ledger, versions=(), incarnation=2)
            run = Incarnation(cluster, ledger, number=2)
            run.fleet.scheduler.pause()
            await run.start()
            await restore_live(recovered, run.payload, run.fleet.scheduler)
            assert not run.payload.stores.name_of(make_node(HOSTS + len(GONE)).id), "nobody needs one there"
            lengths = {one.length for one in run.fleet.scheduler.book.live.values()}
            assert {2, 8} <= lengths, "what the journals had, alone and after what was told"
            run.fleet.scheduler.continue_live()
            run.fleet.scheduler.admit()
            await run.make_steps(2, STEPS)
            await assert_nobody_waits_for(run, (), GONE)
    assert_whole(cluster)
