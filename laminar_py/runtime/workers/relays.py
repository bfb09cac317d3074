"""The processes of the relay tree: placed, started root first, restarted on their ports. Owned by the controller.

A relay that crashed restarts on its old port, and waits for the port while its hung predecessor is being ended. If
the port stays taken, the relay gets another port. Nodes below learn the new address with their next ping, replicas
by an order, and the publisher by a note that the root leaves in their store.

If all parts are on one node, the tree has `relay.nodes` processes there. On several nodes, the root is beside the
learner, and every host with replicas has a relay. After the loss of a host, the plan may place its relay, or the
root, on another host; all others learn its address in the same way.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from laminar_py.config.run import RunConfig
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
from laminar_py.relay.sockets import RelayKeys
from laminar_py.relay.store import MANIFEST, complete_versions, folder_name
from laminar_py.relay.subscriber import Subscriber
from laminar_py.relay.tree import Broadcast, Links, Shape, Topology, choose_tree, grow_tree
from laminar_py.runtime.cluster.backend import on_node
from laminar_py.runtime.cluster.errors import NoAnswerError, PartBugError, PartCrashedError, RemoteCallError
from laminar_py.runtime.cluster.part import Part, watched
from laminar_py.runtime.cluster.placement import Place
from laminar_py.runtime.preflight.inputs import version_bytes
from laminar_py.runtime.preflight.node_checks import NODE_TIMEOUT_S
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.specs import RelaySpec

log = logging.getLogger(__name__)

PING_S = 1.0
CHUNK_OVERHEAD_S = 200e-6  # of a chunk on a link, as measured on hosts of one rack
PORT_SHARE = 0.5  # of the start timeout, to wait for the old port


class Relays:
    """Keeps the nodes of the tree alive; node 0 is the root beside the learner."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.keys = RelayKeys.generate()
        self._incarnation = incarnation
        self._config = incarnation.config
        self._placement = incarnation.placement
        self._shm = incarnation.run.shm(incarnation.config.relay.shm)
        self._record = incarnation.ledger.append
        self._keepers: dict[int, Keeper] = {}
        self._tasks: asyncio.TaskGroup | None = None  # group of the tasks that keep nodes alive, after `start`
        self._hosts: dict[int, str] = {}  # cluster node that a relay is on, or was on
        self._endpoints: dict[int, str] = {}
        self._parents: dict[int, tuple[str, ...]] = {}  # endpoints of the relays above each node, nearest first
        self._attached: dict[int, tuple[int, str]] = {}  # replica -> its relay, and the relay's host at that time
        self._changed = asyncio.Event()  # set, and replaced, when a relay comes up
        self._shape: Shape | None = None
        self._chunk_bytes = 0

    @property
    def tree(self) -> Topology:
        """The present tree. Its shape is chosen once; later nodes are added to it."""
        assert self._shape is not None, "the tree is known after `start`"
        return grow_tree(self._shape, self._zones)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk; chosen once, since all nodes must use the same size."""
        assert self._chunk_bytes, "the size of chunks is known after `start`"
        return self._chunk_bytes

    @property
    def _zones(self) -> list[str]:
        """[N] zone of each node's host."""
        labels, placement = self._config.relay.zones, self._placement
        hosts = [host or self._hosts.get(node) for node, host in enumerate(placement.plan.relays)]
        return [labels.get(placement.ip(host), "") if host else "" for host in hosts]

    @property
    def _names(self) -> dict[str, str]:
        """Name of the node at each known endpoint."""
        return {endpoint: f"relay-{node}" for node, endpoint in self._endpoints.items()}

    def store(self, node: int) -> Path:
        """Return the folder on its host in which a node keeps versions."""
        return self._shm / f"node-{node}"

    @property
    def root(self) -> str:
        """Endpoint of the root."""
        return self._endpoints[0]

    async def attach(self, replica: int, place: Place) -> str:
        """Wait for the relay of a replica at this place, and return its endpoint.

        Raises PartCrashedError if the plan has moved the replica, since its node is gone.
        """
        while True:
            planned = self._placement.plan.replicas[replica]
            if planned is None or planned.node != place.node:
                raise PartCrashedError(f"replica-{replica}", f"its node {place.node} is gone")
            node = self._placement.plan.relay_of(replica, self.tree)
            if self._is_up(node):
                self._attached[replica] = node, self._hosts[node]
                return self._endpoints[node]
            self._keeper(node)  # replicas may have moved to a host that had none
            await self._changed.wait()

    def endpoint_for(self, replica: int) -> str:
        """Return the present endpoint of the relay that a replica is attached to.

        Raises PartCrashedError if the relay moved to another host, whose memory the replica cannot read.
        """
        node, host = self._attached[replica]
        if self._hosts[node] != host:
            raise PartCrashedError(f"replica-{replica}", "its relay has gone to another host")
        return self._endpoints[node]

    async def root_up(self) -> str:
        """Wait until the root is up beside the learner, and return its endpoint."""
        while not self._is_up(0):
            await self._changed.wait()
        return self.root

    async def start(self) -> None:
        """Choose the tree and start all nodes, parents first, since children need their endpoints."""
        await self._settle()
        for node in range(len(self._placement.plan.relays)):
            self._keeper(node).spawn()
        for node in self.tree.downward:
            await self._bring_up(node)

    async def keep(self) -> None:
        """Keep every node alive until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._find_parents()
            for node, keeper in self._keepers.items():
                tasks.create_task(keeper.call_with_restarts(partial(self._watch, node)), name=f"keep-relay-{node}")

    async def hold(self, version: int) -> None:
        """Subscribe to a version at the root for an evaluation, so that the root keeps it."""

        async def follow() -> None:
            while True:
                subscriber.attach(self.root)
                await self._changed.wait()

        subscriber = Subscriber(self.root, f"evaluation-{version}", self.keys)
        listening = asyncio.create_task(subscriber.run(), name=f"hold-{version}")
        try:
            await watched(subscriber.pull(version), follow())
        except VersionLostError as error:  # the learner crashed before it was complete; the evaluation is skipped
            log.warning("version %d is not kept for its evaluation: %s", version, error)
        finally:
            await subscriber.close()
            await listening

    async def published(self) -> list[Manifest]:
        """Return the complete versions in the stores of all relays, ascending, also those not on record."""
        return await self._stored(list(self._hosts.items()))

    async def _settle(self) -> None:
        """Choose the shape of the tree and the size of chunks.

        A resumed run keeps at least the chunk size of its stored versions.
        """
        relay, hosts, zones = self._config.relay, self._placement.plan.relays, self._zones
        known = [host for host in hosts if host is not None]
        assert len(known) == len(hosts), "a first plan has no gaps"
        links = Links(min(relay.link_gbit_per_s * 1e9 / 8, relay.max_bytes_per_s or math.inf), CHUNK_OVERHEAD_S)
        broadcast = Broadcast(version_bytes(self._config))
        choice = choose_tree(relay.topology, fanout=relay.fanout, zones=zones, broadcast=broadcast, links=links)
        cut_before = [manifest.chunk_bytes for manifest in await self._stored(list(enumerate(known)))]
        self._shape = choice.shape
        self._chunk_bytes = max([choice.chunk_bytes, *cut_before])
        shape = choice.shape.describe(num_zones=len(set(zones)))
        log.info("relay tree of %d: %s, chunks of %.2f MiB", len(known), shape, self._chunk_bytes / 2**20)

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
        found = {manifest.version: manifest for manifests in answers for manifest in manifests}
        return [found[version] for version in sorted(found)]

    # ---- one node

    def _keeper(self, node: int) -> Keeper:
        """Return the keeper of a node; make and start one if there is none."""
        if node not in self._keepers:
            self._keepers[node] = Keeper(
                PartSpec(
                    names=[f"relay-{node}"],
                    actor_class="laminar_py.runtime.workers.processes.relay:RelayActor",
                    concurrency=4,
                    timeout_s=self._config.supervisor.heartbeat_timeout_s,
                    places=partial(self._places, node),
                    start=partial(self._start_node, node),
                ),
                self._incarnation,
            )
            if self._tasks is not None:
                watching = self._keepers[node].call_with_restarts(partial(self._watch, node))
                self._tasks.create_task(watching, name=f"keep-relay-{node}")
        return self._keepers[node]

    async def _bring_up(self, node: int) -> None:
        """Start a node, again if it crashes meanwhile, as long as the plan has a host for it."""
        keeper = self._keeper(node)
        while self._placement.plan.relays[node] is not None and not keeper.is_up:
            try:
                await keeper.begin()
            except PartCrashedError as error:
                await keeper.replace(error)

    def _places(self, node: int) -> list[Place | None]:
        """Return the place of a node by the present plan; None once no replica needs it."""
        host = self._placement.plan.relays[node]
        if host is None:
            self._notify()  # replicas that wait for it must use another relay
        return [None if host is None else Place(host)]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch(self, node: int, parts: Sequence[Part]) -> None:
        """Ping a node, with its parents, and record its events.

        Raises PartCrashedError if the plan moves the node.
        """
        self._notify()
        while True:
            for event in await parts[0].call_for(list[RelayEvent], "ping", self._parents[node]):
                self._record(on_record(event, self._names))
            if self._placement.plan.relays[node] not in (None, self._hosts[node]):
                raise PartCrashedError(f"relay-{node}", "it is needed on another host")
            await asyncio.sleep(PING_S)

    async def _start_node(self, node: int, parts: Sequence[Part]) -> None:
        """Start a node, on its old port if it was on this host before and the port is free."""
        (part,) = parts
        host = part.place.node
        assert host is not None, "a relay has a place"
        if node:
            await self.root_up()
        comes_back = self._hosts.get(node) == host
        spec = RelaySpec(
            config=self._config_on(host).model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            node=node,
            store=str(self.store(node)),
            port=self._port(node, host),
            patience_s=PORT_SHARE * self._config.supervisor.heartbeat_timeout_s if comes_back else 0.0,
            or_any_port=comes_back and self._config.relay.base_port is None,
            parents=self._parents_in(self.tree, node),
            chunk_bytes=self.chunk_bytes,
            public_key=self.keys.public,
            secret_key=self.keys.secret,
        )
        endpoint = await part.call("start", spec)
        assert isinstance(endpoint, str)
        self._endpoints[node], self._hosts[node] = endpoint, host
        if self._tasks is not None:  # during `start`, parents are up first
            self._find_parents()

    def _find_parents(self) -> None:
        """Compute the endpoints of the relays above each node, which its next ping brings."""
        tree = self.tree
        self._parents = {node: self._parents_in(tree, node) for node in self._keepers}

    def _parents_in(self, tree: Topology, node: int) -> tuple[str, ...]:
        planned = self._placement.plan.relays
        known = (parent for parent in tree.ancestors(node) if planned[parent] and parent in self._endpoints)
        return tuple(self._endpoints[parent] for parent in known)

    def _is_up(self, node: int) -> bool:
        """Return True if a node runs on the host that the plan gives it."""
        keeper = self._keepers.get(node)
        running = keeper is not None and keeper.is_up
        return running and self._hosts[node] == self._placement.plan.relays[node]

    def _config_on(self, host: str) -> RunConfig:
        """Return the config for a relay on a host: on a cluster it listens on the address of the host."""
        if not self._placement.spread and self._config.cluster.address is None:
            return self._config
        relay = self._config.relay.model_copy(update={"host": self._placement.ip(host)})
        return self._config.model_copy(update={"relay": relay})

    def _port(self, node: int, host: str) -> int:
        if self._hosts.get(node) == host:
            return int(self._endpoints[node].rpartition(":")[2])
        base = self._config.relay.base_port
        return 0 if base is None else base + node


def on_record(event: RelayEvent, names: Mapping[str, str]) -> AnyEvent:
    """Return the ledger's event for a relay's event; the ledger knows nodes by name, not by endpoint."""
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
    found = []
    for version in versions:
        with contextlib.suppress(FileNotFoundError):  # deleted since
            data = (folder / folder_name(version) / MANIFEST).read_bytes()
            found.append(msgspec.json.decode(data, type=Manifest))
    return encode(found)
