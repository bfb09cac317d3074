"""Lines to the replicas that run, or start, and what every one is told without being asked. Owned by `replicas`.

Invariant: a replica knows where its relay is; one whose relay it cannot read any more, or whose weights differ
from another's under the same version, is lost.
"""

from collections.abc import Awaitable, Callable, Sequence

from laminar_py.records.replica import ReplicaReport, WeightLoad
from laminar_py.relay.sockets import PeerServer
from laminar_py.rollout.outbox import GATHER_S
from laminar_py.runtime.cluster.backend import LOOPBACK
from laminar_py.runtime.cluster.errors import PartDiedError
from laminar_py.runtime.link.hub import Line, ReplicaHub
from laminar_py.runtime.link.messages import Follow, Order
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.relays import Relays
from laminar_py.runtime.workers.specs import ReportPace

REPORTS_PER_S, QUIET_PER_S = 2000.0, 200.0  # of all replicas together, as far as a replica may be kept waiting
MOST_GATHER_S, MOST_QUIET_S = 0.25, 5.0
CHECKSUMS_KEPT = 64


class ReplicaLines:
    """A line to each replica, from its start to its end; `take` has the new reports of a moment."""

    def __init__(
        self,
        incarnation: Incarnation,
        relays: Relays,
        *,
        take: Callable[[Sequence[tuple[Line, ReplicaReport]]], Awaitable[None]],
    ) -> None:
        config, placement = incarnation.config, incarnation.placement
        here = placement.here.node if config.cluster.address is not None else None
        self.hub = ReplicaHub(
            PeerServer(relays.keys, LOOPBACK if here is None else placement.ip(here)),
            take=take,
            patience_s=config.supervisor.heartbeat_timeout_s,
        )
        self._placement = placement
        self._patience_s = config.supervisor.heartbeat_timeout_s
        self._relays = relays
        self._lines: dict[int, Line] = {}
        self._relay_told: dict[int, str] = {}  # endpoint that each pulls from, as far as it was told
        self._checksums: dict[tuple[int, int], tuple[str, int]] = {}  # (version, GPUs) -> checksum and whose it is

    @property
    def pace(self) -> ReportPace:
        """Pace of a replica that starts now, by the size of the fleet."""
        return pace_of(len(self._placement.plan.replicas), self._patience_s)

    async def open(self, index: int, label: str, relay: str) -> None:
        """Have a line to a replica that is about to start under a label, with this relay."""
        await self.close(index)  # of a start that failed
        self._lines[index] = self.hub.open(label, index)
        self._relay_told[index] = relay

    async def close(self, index: int) -> None:
        """Hear no more of a replica, if there is a line to it."""
        line = self._lines.pop(index, None)
        if line is not None:
            await self.hub.close(line)

    async def until_lost(self, index: int) -> None:
        """Until a replica that has started is of no use any more. Raises PartDiedError."""
        line = self._lines[index]
        self.hub.begin(line)
        raise PartDiedError(f"replica-{index}", await line.lost)

    def tell(self, index: int, order: Order) -> None:
        """Tell a replica that runs, or starts; another has nothing that an order could be about."""
        line = self._lines.get(index)
        if line is not None:
            line.put(order)

    def get(self, index: int) -> Line | None:
        """The line to a replica that runs, or starts."""
        return self._lines.get(index)

    def keep_attached(self, line: Line) -> None:
        """Tell a replica where its relay is now; one whose relay has gone to another host cannot go on."""
        try:
            relay = self._relays.endpoint_for(line.replica)
        except PartDiedError as error:
            line.lose(error.reason)
            return
        if relay != self._relay_told[line.replica]:
            self._relay_told[line.replica] = relay
            line.put(Follow(relay))

    def compare(self, line: Line, loads: Sequence[WeightLoad]) -> None:
        """Engines that verified one version in one layout hold the same tensors; one that does not is lost."""
        for load in loads:
            if load.checksum is None:
                continue
            layout = load.checksum.count("-") + 1
            agreed, first = self._checksums.setdefault((load.version, layout), (load.checksum, line.replica))
            if agreed != load.checksum:
                line.lose(f"its weights of version {load.version} differ from those of replica-{first}")
        for key in sorted(self._checksums)[:-CHECKSUMS_KEPT]:
            del self._checksums[key]


def pace_of(replicas: int, patience_s: float) -> ReportPace:
    """Pace of each of so many, so that all together report 2,000 times a second at most, 200 in peace.

    Nobody is kept waiting for more than a quarter of a second, so above 500 they may be more.
    None is quiet for so long that it counts as silent.
    """
    return ReportPace(
        gather_s=min(MOST_GATHER_S, max(GATHER_S, replicas / REPORTS_PER_S)),
        quiet_s=min(MOST_QUIET_S, patience_s / 4, max(1.0, replicas / QUIET_PER_S)),
    )
