"""The processes of the relay tree: placed, started root first, restarted. Owned by the controller.

A relay that crashed restarts on another port. Nodes below get the new address with their next ping, and replicas
with a command. The publisher needs no address: it writes versions into the root's store, which inotify reports.

If all parts are on one node, the tree has `relay.nodes` processes there. On several nodes, the root is beside the
learner, and every host with replicas has a relay. After the loss of a host, the plan may place its relay, or the
root, on another host; other nodes and replicas get the new address in the same way.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from laminar_py.records.codec import decode, encode
from laminar_py.records.events import AnyEvent, Pulled, Reattached, Relayed, RelayGaveUp
from laminar_py.records.weights import VersionLostError
from laminar_py.relay.messages import (
    Manifest,
    ParentLost,
    RelayEvent,
    VersionComplete,
    VersionFailed,
    VersionPulled,
)
from laminar_py.relay.sockets import generate_keys
from laminar_py.relay.sources import MAX_SOURCES
from laminar_py.relay.stored_version import MANIFEST
from laminar_py.relay.subscriber import Subscriber
from laminar_py.relay.tree import CHUNK_OVERHEAD_S, Topology, choose_chunk_bytes, grow_tree
from laminar_py.relay.version_store import complete_versions, folder_name
from laminar_py.runtime.cluster.backend import on_node
from laminar_py.runtime.cluster.errors import NoAnswerError, PartBugError, PartCrashedError, RemoteCallError
from laminar_py.runtime.cluster.part import Part, watched
from laminar_py.runtime.cluster.placement import NodeSlot
from laminar_py.runtime.preflight.inputs import version_bytes
from laminar_py.runtime.preflight.node_checks import NODE_TIMEOUT_S
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper
from laminar_py.runtime.workers.specs import RelaySpec

log = logging.getLogger(__name__)

PING_S = 1.0


class RelayKeeper(Keeper):
    """Keeps one node of the tree alive."""

    actor_class = "laminar_py.runtime.workers.processes.relay:RelayActor"

    def __init__(self, relays: "Relays", node: int) -> None:
        super().__init__(relays.incarnation, f"relay-{node}")
        self.timeout_s = self._config.supervisor.heartbeat_timeout_s
        self.host: str | None = None  # cluster node that the relay is on, or was on
        self.endpoint = ""
        self._node = node
        self._relays = relays

    @property
    def planned_host(self) -> str | None:
        """The relay's host by the present plan; None if no replica needs it."""
        return self._placement.plan.relays[self._node]

    @property
    def is_serving(self) -> bool:
        """True if the relay runs on the host that the plan gives it."""
        return self.is_up and self.host == self.planned_host

    def places(self) -> Sequence[NodeSlot | None]:
        """Return the relay's place by the present plan; None, after a `notify`, if no replica needs it."""
        host = self.planned_host
        if host is None:
            self._relays.notify()  # replicas that wait for this relay must use another
        return [None if host is None else NodeSlot(host)]

    async def start_parts(self, parts: Sequence[Part]) -> None:
        """Start the relay below its parents, once the root is up; note its endpoint and host."""
        (part,) = parts
        host = part.place.node
        assert host is not None, "a relay has a place"
        if self._node:
            await self._relays.root_up()
        here_alone = not self._placement.spread and self._config.cluster.address is None
        spec = RelaySpec(
            config=self._config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            node=self._node,
            store=str(self._relays.store(self._node)),
            host=self._config.relay.host if here_alone else self._placement.ip(host),
            parents=self._relays.parents_of(self._node),
            sources=self._relays.sources_of(self._node),
            chunk_bytes=self._relays.chunk_bytes,
            keys=self._relays.keys,
        )
        endpoint = await part.call("start", spec)
        assert isinstance(endpoint, str)
        self.endpoint, self.host = endpoint, host
        self._relays.notify()

    async def watch(self, parts: Sequence[Part]) -> None:
        """Ping the relay with its parents' endpoints; record its events. Raises PartCrashedError if it moves."""
        self._relays.notify()
        while True:
            parents, sources = self._relays.parents_of(self._node), self._relays.sources_of(self._node)
            events = await parts[0].call_for(list[RelayEvent], "ping", parents, sources)
            names = self._relays.names if events else {}
            for event in events:
                self._incarnation.ledger.append(ledger_event(event, names))
            if self.planned_host not in (None, self.host):
                raise PartCrashedError(f"relay-{self._node}", f"the plan moves it to {self.planned_host}")
            await asyncio.sleep(PING_S)


class Relays:
    """Keeps the nodes of the tree alive; node 0 is the root beside the learner."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.keys = generate_keys()
        self.incarnation = incarnation
        self._config = incarnation.config
        self._placement = incarnation.placement
        self._shm = incarnation.run.shm(incarnation.config.relay.shm)
        self._keepers: dict[int, RelayKeeper] = {}
        self._tasks: asyncio.TaskGroup | None = None  # group of the tasks that keep nodes alive, after `start`
        # replica -> its relay, and the relay's host at that time
        self._attached: dict[int, tuple[int, str | None]] = {}
        self._changed = asyncio.Event()  # set, and replaced, when a relay comes up
        self._parents: dict[int, tuple[str, ...]] = {}  # result of `parents_of` by node, until the next `notify`
        self._chunk_bytes = 0

    @property
    def tree(self) -> Topology:
        """The tree of the present plan's relays; a later plan may add nodes."""
        return grow_tree(len(self._placement.plan.relays), fanout=self._config.relay.fanout)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk; chosen once, since all nodes must use the same size."""
        assert self._chunk_bytes, "the size of chunks is known after `start`"
        return self._chunk_bytes

    @property
    def names(self) -> dict[str, str]:
        """Names of relays by endpoint, e.g. "relay-0"."""
        return {keeper.endpoint: f"relay-{node}" for node, keeper in self._keepers.items()}

    def store(self, node: int) -> Path:
        """Return the folder in which a node keeps versions, in memory of the node's host."""
        return self._shm / f"node-{node}"

    @property
    def root(self) -> str:
        """Endpoint of the root."""
        return self._keepers[0].endpoint

    async def attach(self, replica: int, place: NodeSlot) -> str:
        """Wait for the relay of a replica at this place, and return its endpoint.

        Raises PartCrashedError if the plan has moved the replica, since its node is gone.
        """
        while True:
            planned = self._placement.plan.replicas[replica]
            if planned is None or planned.node != place.node:
                raise PartCrashedError(f"replica-{replica}", f"its node {place.node} is gone")
            node = self._placement.plan.relay_of(replica, self.tree)
            keeper = self._keeper(node)  # replicas may have moved to a host that had none
            if keeper.is_serving:
                self._attached[replica] = node, keeper.host
                return keeper.endpoint
            await self._changed.wait()

    def endpoint_for(self, replica: int) -> str:
        """Return the present endpoint of the relay that a replica is attached to.

        Raises PartCrashedError if the relay moved to another host, whose memory the replica cannot read.
        """
        node, host = self._attached[replica]
        if self._keepers[node].host != host:
            raise PartCrashedError(f"replica-{replica}", "its relay has gone to another host")
        return self._keepers[node].endpoint

    async def root_up(self) -> str:
        """Wait until the root is up beside the learner, and return its endpoint."""
        while not self._keeper(0).is_serving:
            await self._changed.wait()
        return self.root

    async def start(self) -> None:
        """Start all nodes, parents first, since children need their endpoints."""
        await self._choose_chunks()
        for node in range(len(self._placement.plan.relays)):
            self._keeper(node).spawn()
        for node in self.tree.downward:
            await self._bring_up(node)

    async def keep(self) -> None:
        """Keep every node alive until cancelled, also nodes that later plans add. Raises an ExceptionGroup."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for node, keeper in self._keepers.items():
                tasks.create_task(keeper.keep(), name=f"keep-relay-{node}")

    async def hold(self, version: int) -> None:
        """Pull a version at the root for an evaluation, so that the root keeps it; only log a lost version."""

        async def follow() -> None:
            while True:
                subscriber.attach(self.root)
                await self._changed.wait()

        subscriber = Subscriber(self.root, f"evaluation-{version}", self.keys)
        listening = asyncio.create_task(subscriber.run(), name=f"hold-{version}")
        try:
            await watched(subscriber.pull(version), follow())
        except VersionLostError as error:  # the learner crashed before it was complete
            log.warning("version %d is lost, so its evaluation is skipped: %s", version, error)
        finally:
            await subscriber.close()
            await listening

    async def published(self) -> list[Manifest]:
        """Return the complete versions in the stores of all relays, ascending, also if the ledger lacks them."""
        known = [(node, keeper.host) for node, keeper in self._keepers.items()]
        return await self._stored([(node, host) for node, host in known if host is not None])

    async def _choose_chunks(self) -> None:
        """Set the size of chunks, which in a resumed run is at least the size in the stored versions."""
        relay, hosts = self._config.relay, self._placement.plan.relays
        known = [host for host in hosts if host is not None]
        assert len(known) == len(hosts), "a first plan has no gaps"
        speed = relay.link_gbit_per_s * 1e9 / 8
        best = choose_chunk_bytes(
            self.tree, version_bytes(self._config), bytes_per_s=speed, overhead_s=CHUNK_OVERHEAD_S
        )
        cut_before = [manifest.chunk_bytes for manifest in await self._stored(list(enumerate(known)))]
        self._chunk_bytes = max([best, *cut_before])
        mib = self._chunk_bytes / 2**20
        log.info("relay tree of %d with fan-out %d, chunks of %.2f MiB", len(known), relay.fanout, mib)

    async def _stored(self, hosts: Sequence[tuple[int, str]]) -> list[Manifest]:
        """Return the complete versions in the stores of (node, host) pairs; ascending, each once."""

        async def look(node: int, host: str) -> list[Manifest]:
            """Return the manifests that a node's store holds; none if its host is gone or does not answer.

            Raises `PartBugError` if the function itself fails there.
            """
            try:
                async with asyncio.timeout(NODE_TIMEOUT_S):
                    return decode(list[Manifest], await on_node(host, stored_manifests, str(self.store(node))))
            except TimeoutError:
                reason = f"no answer in {NODE_TIMEOUT_S:g} s"
            except RemoteCallError as error:
                if error.is_bug:
                    raise PartBugError(f"relay-{node}: {error}") from error
                reason = str(error)
            except NoAnswerError:  # the host is gone, and its versions with it
                return []
            log.warning("relay-%d: %s from node %s; its versions are ignored", node, reason, host)
            return []

        answers = await asyncio.gather(*(look(node, host) for node, host in hosts))
        by_version = {manifest.version: manifest for manifests in answers for manifest in manifests}
        return [by_version[version] for version in sorted(by_version)]

    # ---- nodes

    def _keeper(self, node: int) -> RelayKeeper:
        """Return the keeper of a node; make and start one if there is none."""
        if node not in self._keepers:
            self._keepers[node] = RelayKeeper(self, node)
            if self._tasks is not None:
                self._tasks.create_task(self._keepers[node].keep(), name=f"keep-relay-{node}")
        return self._keepers[node]

    async def _bring_up(self, node: int) -> None:
        """Start a node, again after each crash, until it is up or the plan has no host for it."""
        keeper = self._keeper(node)
        while keeper.planned_host is not None and not keeper.is_up:
            try:
                await keeper.begin()
            except PartCrashedError as error:
                await keeper.replace(error)

    def notify(self) -> None:
        """Wake the callers that wait for a relay, and have `parents_of` look up endpoints again."""
        self._parents.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    def parents_of(self, node: int) -> tuple[str, ...]:
        """Return the endpoints of the needed and started relays above a node, nearest first."""
        if node not in self._parents:
            self._parents[node] = self._endpoints(self.tree.ancestors(node))
        return self._parents[node]

    def sources_of(self, node: int) -> tuple[str, ...]:
        """Return the endpoints of other started relays, of which a node may request chunks when it joins late."""
        return self._endpoints(self.tree.sources(node, count=MAX_SOURCES))

    def _endpoints(self, nodes: Iterable[int]) -> tuple[str, ...]:
        keepers = (self._keepers.get(node) for node in nodes)
        return tuple(keeper.endpoint for keeper in keepers if keeper and keeper.planned_host and keeper.endpoint)


def ledger_event(event: RelayEvent, names: Mapping[str, str]) -> AnyEvent:
    """Return the ledger's event for a relay's event; `names` has the node names, which replace endpoints."""
    match event:
        case VersionComplete():
            return Relayed(**msgspec.structs.asdict(event) | {"parent": names.get(event.parent, "")})
        case VersionPulled():
            return Pulled(**msgspec.structs.asdict(event))
        case VersionFailed():
            return RelayGaveUp(**msgspec.structs.asdict(event))
        case ParentLost():
            return Reattached(**msgspec.structs.asdict(event))


def stored_manifests(store: str) -> bytes:
    """Return the encoded manifests of the complete versions in a store on this host."""
    folder = Path(store)
    versions = complete_versions(folder) if folder.is_dir() else []
    manifests = []
    for version in versions:
        with contextlib.suppress(FileNotFoundError):  # the relay has deleted the version
            data = (folder / folder_name(version) / MANIFEST).read_bytes()
            manifests.append(msgspec.json.decode(data, type=Manifest))
    return encode(manifests)
