"""Replicas that die, that find no room, and that are told something as they start.

Without processes: a replica is an object of the test's own at the other end of a real link.
"""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from laminar_py.config.loading import load_config
from laminar_py.control.dispatcher import DISPATCH_S, Throttle
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.salvage import Salvaged
from laminar_py.observe.stats import Stats, Totals
from laminar_py.records.codec import decode
from laminar_py.records.engine import EngineStatus, PauseMode
from laminar_py.records.events import PartCrashed, ReplicaLeft, VersionLoaded
from laminar_py.records.host import SystemClock
from laminar_py.records.replica import ReplicaReport
from laminar_py.records.spans import Span
from laminar_py.relay.sockets import PeerClient, generate_keys, peer_sockets
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.placement import Needs, Node, Placement
from laminar_py.runtime.link.replica_link import ReplicaLink
from laminar_py.runtime.orchestrator.controller import dispatch, process_reports
from laminar_py.runtime.orchestrator.setup import Handoff
from laminar_py.runtime.workers.incarnation import Supervisor
from laminar_py.runtime.workers.replicas import ReplicaKeeper, Replicas, pace_of
from laminar_py.runtime.workers.specs import ReplicaSpec
from tests.control.fleet import Fleet, make_tokens
from tests.runs.runs import REPO
from tests.workers.fakes import Processes, Segments, make_incarnation

PATIENCE_S = 10.0
NODES = (
    Node(id="a", ip="127.0.0.1", gpus=2, cpus=8, here=True),  # for the learner and replica 0
    Node(id="b", ip="10.0.0.2", gpus=1, cpus=8),
)


class Replica:
    """What runs in a replica's process: it starts once it may, and says what the test lets it say."""

    def __init__(self, index, may_start):
        self.index = index
        self.may_start = may_start
        self.spec = asyncio.get_running_loop().create_future()
        self.reports = asyncio.Queue()  # joined once all were told
        self.did = asyncio.Queue()  # names of orders, and what they name
        self.held = None  # by which mode
        self.may_stop = asyncio.Event()  # cleared where it computes on although it is to hold
        self.may_stop.set()
        self.outlives = False  # its process is dead for Ray, and still speaks
        self.life = None
        self._given = False

    async def start(self, data):
        spec = decode(ReplicaSpec, data)
        self.spec.set_result(spec)
        await self.may_start.wait()
        self.life = asyncio.create_task(self._live(spec))

    async def _live(self, spec):
        wire = peer_sockets(spec.keys)
        peer = PeerClient(wire, spec.hub, spec.label)
        try:
            await ReplicaLink(peer, self, attach=self.attach, quiet_s=spec.pace.quiet_s).run()
        finally:
            wire.close()

    def pid(self):
        return 7

    async def ended(self):
        try:
            await asyncio.shield(self.life)
        finally:
            if not self.outlives:
                self.life.cancel()

    # ---- what the link calls

    async def next_report(self, timeout_s):
        if self._given:
            self.reports.task_done()
        self._given = False
        report = await self.reports.get()
        self._given = True
        return report

    def start_assignments(self, assignments):
        self.did.put_nowait(("submit", assignments))

    async def abort(self, trajectory_ids):
        self.did.put_nowait(("abort", trajectory_ids))

    async def stop(self, *, evaluations):
        self.did.put_nowait(("stop", evaluations))

    def call_off(self, names):
        self.did.put_nowait(("call_off", names))

    async def hold(self, mode):
        await self.may_stop.wait()
        self.held = mode

    async def unhold(self):
        self.held = None

    def report_soon(self):
        self.report()

    def attach(self, relay):
        self.did.put_nowait(("attach", relay))

    # ---- what a test calls

    def report(self, *, version=0, admissible=64, received=0, loads=()):
        status = EngineStatus(running=0, waiting=0, kv_used=0, kv_capacity=1, version=version)
        report = ReplicaReport(
            replica=self.index, status=status, admissible=admissible, received=received, loads=loads
        )
        self.reports.put_nowait(report)

    async def told(self, order):
        """What it is told by the next order of this name."""
        while True:
            name, what = await self.did.get()
            if name == order:
                return what

    async def given(self, number):
        """The next assignments, so many."""
        found = []
        while len(found) < number:
            found += await self.told("submit")
        return found


class World:
    """Replicas of a real scheduler and a real plan, on nodes that the test takes away and gives back."""

    def __init__(self, monkeypatch, path, *overrides, every_s=DISPATCH_S):
        config = self.config = load_config(REPO / "configs/quickstart.yaml", ["rollout.replicas=2", *overrides])
        self.nodes = list(NODES)
        self.placement = Placement(
            Needs(ranks=1, rank_gpus=1, replicas=2, replica_gpus=1), lambda: list(self.nodes)
        )
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.actors = []
        self.processes = Processes(monkeypatch, self._make)
        self.fleet = Fleet(replicas=2, group_size=4, batch=4, capacity=16)
        self.scheduler = self.fleet.scheduler

        self.supervisor = Supervisor(record=lambda event: None, max_restarts=9)

        self.relay = "tcp://relay"
        self.moved = set()  # replicas whose relay is on another host
        self.segments = Segments()
        self.recorded = []  # by the replicas themselves
        self.left = asyncio.Event()  # one of them

        async def attach(replica, place):
            self.moved.discard(replica)
            return self.relay

        def endpoint_for(replica):
            if replica in self.moved:
                raise PartCrashedError(f"replica-{replica}", "its relay has gone to another host")
            return self.relay

        self.stats = Stats(SystemClock(), replicas=2, totals=Totals())
        self.dispatch_loop = Throttle(self._dispatch, every_s=every_s)
        self.reports = Handoff()
        self.replicas = Replicas(
            make_incarnation(
                config=config,
                run=RunFolder(path),
                placement=self.placement,
                supervisor=self.supervisor,
                stats=self.stats,
                ledger=SimpleNamespace(append=self.record),
            ),
            scheduler=self.scheduler,
            relays=SimpleNamespace(
                attach=attach,
                endpoint_for=endpoint_for,
                keys=generate_keys(),
            ),
            segments=self.segments,
            dispatch_loop=self.dispatch_loop,
            on_reports=self.reports.hand_over,
        )

    def _dispatch(self):
        dispatch(self.scheduler, replicas=self.replicas, dispatch_loop=self.dispatch_loop, stats=self.stats)

    async def keep(self):
        """Keep the replicas, and run the loops of the controller that reach them."""
        loop = {"replicas": self.replicas, "dispatch_loop": self.dispatch_loop, "stats": self.stats}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.replicas.keep())
            tasks.create_task(self.dispatch_loop.run())
            tasks.create_task(process_reports(self.reports, scheduler=self.scheduler, **loop))

    def _make(self, name):
        self.actors.append(Replica(int(name[-1]), self.may_start))
        return self.actors[-1]

    def had_by(self, index):
        """Trajectories that a replica has."""
        return set(self.scheduler.views.by_index[index].in_flight)

    async def end(self):
        """Have nothing speak any more."""
        if lives := [actor.life for actor in self.actors if actor.life is not None]:
            for life in lives:
                life.cancel()
            await asyncio.wait(lives)

    def record(self, event):
        self.recorded.append(event)
        if isinstance(event, ReplicaLeft):
            self.left.set()

    async def next(self):
        """The next process that is spawned, once it is asked to start."""
        process = await self.processes.next()
        await process.actor.spec
        return process


@asynccontextmanager
async def kept(world):
    """Both replicas' processes, which serve version 0."""
    async with asyncio.timeout(PATIENCE_S):
        world.replicas.spawn()
        keeping = asyncio.create_task(world.keep())
        first, second = await world.next(), await world.next()
        for process in (first, second):
            process.actor.report(admissible=8)
            assert ids(await process.actor.given(8)) == world.had_by(process.actor.index)
        try:
            yield first, second
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
            await world.end()


def ids(assignments):
    return {assignment.trajectory_id for assignment in assignments}


async def test_what_a_dead_replica_had_is_done_by_another_and_a_process_takes_its_place(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    async with kept(world) as (first, second):
        had = world.had_by(0)
        assert had
        first.die()
        assert ids(await second.actor.given(len(had))) == had
        third = await world.next()
        assert (third.name, third.place) == (first.name, first.place)
    assert world.scheduler.views.by_index[1].in_flight >= had


async def test_before_the_next_tick_only_one_without_work_or_of_another_version_is_answered(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, every_s=100 * PATIENCE_S)
    async with kept(world) as (first, second):  # which had no work
        first.actor.report(received=8, admissible=64)
        await first.actor.reports.join()
        await asyncio.sleep(0.1)
        assert first.actor.did.empty()
        second.actor.report(received=8, version=1)
        more = 12 * 4
        while first.actor.did.qsize() + second.actor.did.qsize() < more:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_replica_without_room_counts_for_nobody_until_there_is_some(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    views = world.scheduler.views
    async with kept(world) as (first, second):
        had = world.had_by(1)
        world.nodes.remove(NODES[1])
        second.die("its node is gone")
        assert ids(await first.actor.given(len(had))) == had
        assert [place is None for place in world.placement.plan.replicas] == [False, True]
        assert (views.num_placed, views.num_starting()) == (1, 0)
        assert await world.replicas.survey(1) is None
        assert not await world.replicas.expect(1, 0, sorted(had))
        await world.placement.refresh()
        assert world.processes.none_left
        world.nodes.append(Node(id="c", ip="10.0.0.3", gpus=1, cpus=8))
        third = await world.next()
        assert (third.name, third.place.node) == (second.name, "c")


async def test_replicas_that_die_together_are_all_replaced_and_what_they_had_goes_on(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    async with kept(world) as both:
        had = set().union(*(view.in_flight for view in world.scheduler.views.by_index.values()))
        for process in both:
            process.die("the cluster hung")
        fresh = [await world.next(), await world.next()]
        assert {process.name for process in fresh} == {"replica-0", "replica-1"}
        assert world.supervisor.total_restarts == 2
        fresh[0].actor.report()
        assert ids(await fresh[0].actor.given(len(had))) == had


async def test_what_is_aborted_as_a_replica_starts_with_it_is_aborted_once_that_is_up(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    aborts = {}
    monkeypatch.setattr(world.scheduler.state, "take_aborts", lambda: {0: aborts.pop(0)} if aborts else {})
    async with kept(world) as (first, _):
        world.may_start.clear()
        first.die()
        third = await world.next()
        aborts[0] = ["g0.0"]
        world.dispatch_loop.run_now()
        await asyncio.sleep(0.1)
        assert third.actor.did.empty()
        world.may_start.set()
        third.actor.report(admissible=0)
        assert await third.actor.told("abort") == ["g0.0"]


async def test_what_the_journal_of_a_dead_replica_has_goes_on_elsewhere_and_the_journal_goes(
    monkeypatch, tmp_path
):
    world = World(monkeypatch, tmp_path)
    async with kept(world) as (first, second):
        label = (await first.actor.spec).label
        name, *_ = had = sorted(world.scheduler.views.by_index[0].in_flight)
        world.segments.found = [
            Salvaged(trajectory_id=name, tokens=make_tokens(0, 5), spans=(Span(0, 0, 5),), used_s=1.0)
        ]
        first.die()
        third = await world.next()
        assert world.segments.running[label].keys() == set(had)
        assert world.segments.discarded == [f"{label}.1.journal"]
        moved = {item.trajectory_id: item.length for item in await second.actor.given(len(had))}
        assert moved == {one: 5 * (one == name) for one in had}
        assert (await third.actor.spec).label != label


async def test_a_replica_whose_disk_is_full_is_tried_again_and_ends_no_run(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    async with kept(world) as (first, second):
        had = world.had_by(0)
        first.die("StoreFullError: segments=there: cannot be written (No space left on device); make room")
        third = await world.next()
        assert third.name == first.name
        assert ids(await second.actor.given(len(had))) == had
    assert world.supervisor.total_restarts == 0
    assert [event.part for event in world.recorded] == ["replica-0"]


@pytest.mark.parametrize("evaluations", [True, False])
async def test_what_stops_is_not_waited_for_where_it_has_died(monkeypatch, tmp_path, evaluations):
    world = World(monkeypatch, tmp_path)
    async with kept(world) as both:
        world.scheduler.pause()
        world.may_start.clear()  # so nothing reports any more
        stopping = asyncio.create_task(world.replicas.stop(evaluations=evaluations))
        await asyncio.sleep(0)
        assert not stopping.done()
        for process in both:
            process.die()
        await stopping
    assert world.scheduler.views.in_flight == 0


async def test_a_replica_ended_on_purpose_is_no_death(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    async with kept(world) as (first, second):
        world.replicas.restart()
        fresh = [await world.next(), await world.next()]
        assert Counter(process.name for process in fresh) == {"replica-0": 1, "replica-1": 1}
        assert [process.is_dead for process in (first, second)] == [True, True]
    assert world.supervisor.total_restarts == 0


async def test_a_replica_whose_relay_has_moved_is_told_and_keeps_what_it_has(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    async with kept(world) as (first, _):
        had = world.had_by(0)
        world.relay = "tcp://moved"
        first.actor.report(received=len(had), admissible=0)
        assert await first.actor.told("attach") == "tcp://moved"
        first.actor.report(received=len(had), admissible=0)
        await first.actor.reports.join()
        await asyncio.sleep(0.1)
        assert first.actor.did.empty(), "it is told once"
        assert not first.is_dead
        assert world.had_by(0) == had
    assert world.supervisor.total_restarts == 0


async def test_a_replica_whose_relay_has_gone_to_another_host_is_replaced(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    async with kept(world) as (first, second):
        had = world.had_by(0)
        world.moved.add(0)
        first.actor.report(received=len(had), admissible=0)
        assert ids(await second.actor.given(len(had))) == had
        assert (await world.next()).name == first.name
    assert world.supervisor.total_restarts == 1


async def test_a_replica_whose_weights_differ_from_anothers_of_that_version_is_replaced(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)

    def loads(version, checksum):
        return (VersionLoaded(replica=0, version=version, digest="d", elapsed_s=1.0, checksum=checksum),)

    async with kept(world) as (first, second):
        first.actor.report(received=8, admissible=0, loads=loads(0, "one"))
        await first.actor.reports.join()
        second.actor.report(received=8, admissible=0, loads=loads(0, "one-two"))  # two GPUs: another layout
        await second.actor.reports.join()
        assert not second.is_dead
        second.actor.report(received=8, admissible=0, loads=loads(0, "other"))
        assert (await world.next()).name == second.name
        assert (first.is_dead, second.is_dead) == (False, True)
    assert world.supervisor.total_restarts == 1


async def test_a_replica_that_says_nothing_is_replaced(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, "supervisor.heartbeat_timeout_s=2")
    async with kept(world) as (first, second):
        had = world.had_by(0)
        talking = asyncio.create_task(talk(second))
        third = await world.next()
        assert third.name == first.name
        assert not second.is_dead
        assert ids(await second.actor.given(len(had))) == had
        talking.cancel()


@pytest.mark.parametrize(("replicas", "patience_s"), [(1, 30.0), (1000, 30.0), (1000, 4.0), (1, 0.5)])
def test_no_replica_is_quiet_for_so_long_that_it_counts_as_dead(replicas, patience_s):
    pace = pace_of(replicas, patience_s)
    assert 0 < pace.quiet_s <= patience_s / 4


async def talk(process):
    while True:
        process.actor.report(received=8, admissible=0)
        await asyncio.sleep(0.2)


async def test_one_that_was_started_and_never_speaks_is_replaced(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, "supervisor.heartbeat_timeout_s=2")
    async with asyncio.timeout(PATIENCE_S):
        world.replicas.spawn()
        monkeypatch.setattr(Replica, "_live", lambda self, spec: asyncio.sleep(PATIENCE_S))
        keeping = asyncio.create_task(world.keep())
        names = [(await world.next()).name for _ in range(3)]
        assert names[2] in names[:2]
        keeping.cancel()
        await asyncio.wait([keeping])
        await world.end()


async def test_what_a_process_says_that_counts_as_dead_counts_for_nothing(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    async with kept(world) as (first, second):
        had = world.had_by(0)
        first.actor.outlives = True
        first.die("its node is cut off")
        third = await world.next()
        assert ids(await second.actor.given(len(had))) == had
        first.actor.report(version=7, admissible=64)
        third.actor.report(version=1, admissible=0)
        await third.actor.reports.join()
        await asyncio.sleep(0.2)
        assert world.scheduler.views.by_index[0].version == 1
        assert first.actor.did.empty()


def scale(world, *, replicas=3, gone=()):
    """Have the run know of more replicas, or of some that have left."""
    for index in range(len(world.scheduler.views.by_index), replicas):
        world.scheduler.views.join(index)
    world.replicas.join(world.config)
    return world.placement.scale(replicas=replicas, gone=frozenset(gone))


async def test_one_that_joins_waits_for_a_node_and_is_given_work(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    async with kept(world):
        await scale(world)
        assert world.placement.plan.replicas[2] is None
        world.nodes.append(Node(id="c", ip="10.0.0.3", gpus=1, cpus=8))
        third = await world.next()
        assert (third.name, third.place.node) == ("replica-2", "c")
        third.actor.report()
        assert await third.actor.given(1)
    assert list(world.replicas._stats.replicas) == [0, 1, 2]


async def test_one_that_left_is_no_death_and_its_process_is_the_last(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    async with kept(world) as (first, second):
        world.scheduler.leave(1)
        second.actor.report(received=8, admissible=8)
        had = set(world.scheduler.views.by_index[1].in_flight)
        world.replicas.remove(1)
        await world.left.wait()
        assert world.replicas.left == {1: "scaled"}
        assert second.is_dead
        assert ids(await first.actor.given(len(had))) == had, "what it still had is not lost"
        assert world.processes.none_left
    assert world.recorded == [ReplicaLeft(1)]
    assert not world.supervisor.total_restarts
    assert list(world.replicas._stats.replicas) == [0]


async def test_one_that_dies_as_it_leaves_is_not_started_again(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    async with kept(world) as (first, second):
        had = set(world.scheduler.views.by_index[1].in_flight)
        world.scheduler.leave(1)
        second.die()
        assert ids(await first.actor.given(len(had))) == had
        await world.left.wait()
        assert world.processes.none_left
    assert world.recorded == [PartCrashed("replica-1", "killed"), ReplicaLeft(1)]
    assert not world.supervisor.total_restarts


async def test_a_replica_that_joins_and_does_not_start_leaves_again_and_ends_no_run(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    world.nodes.append(Node(id="c", ip="10.0.0.3", gpus=1, cpus=8))
    async with kept(world):
        world.may_start.clear()
        await scale(world)
        for _ in range(ReplicaKeeper.first_starts):
            (await world.next()).die("no such engine")
        await world.left.wait()
        assert world.scheduler.views.num_placed == 2
    assert world.replicas.left == {2: "replica-2 does not start: no such engine; see logs/replica-2.log"}


SHARED = "cluster.share=true"


async def test_shared_replicas_are_held_together_and_go_on_together(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, SHARED)
    async with kept(world) as both:
        await world.replicas.shared.hold()
        assert [process.actor.held for process in both] == [PauseMode.IN_PLACE] * 2
        assert world.replicas.shared.load()[0] == 16
        await world.replicas.shared.release()
        assert [process.actor.held for process in both] == [None] * 2


async def test_a_replica_that_dies_before_it_has_stopped_holds_nobody_up_and_starts_in_the_replicas_turn(
    monkeypatch, tmp_path
):
    world = World(monkeypatch, tmp_path, SHARED)
    async with kept(world) as (first, second):
        first.actor.may_stop.clear()
        hold = asyncio.create_task(world.replicas.shared.hold())
        while second.actor.held is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not hold.done(), "replica 0 computes"
        first.die()
        await hold
        third = await world.processes.next()
        await asyncio.sleep(0.1)
        assert not third.actor.spec.done(), "it starts no engine in the learner's turn"
        await world.replicas.shared.release()
        await third.actor.spec


async def test_the_learner_s_turn_waits_for_a_replica_that_is_starting(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, SHARED)
    async with kept(world) as (first, second):
        world.may_start.clear()
        first.die()
        third = await world.next()
        hold = asyncio.create_task(world.replicas.shared.hold())
        await asyncio.sleep(0.1)
        assert not hold.done()
        world.may_start.set()
        third.actor.report()
        await hold
        assert third.actor.held is second.actor.held is PauseMode.IN_PLACE


async def test_an_order_to_hold_that_is_late_for_a_release_holds_nothing(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, SHARED)
    async with kept(world) as both:
        hold = asyncio.create_task(world.replicas.shared.hold())
        await asyncio.sleep(0)
        hold.cancel()
        await world.replicas.shared.release()
        assert [process.actor.held for process in both] == [None] * 2
