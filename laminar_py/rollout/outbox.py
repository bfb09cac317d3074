"""Reports of a replica: news gathers here until the controller collects it. Owned by `replica`.

Invariant: what was put in is in exactly one report, in the order in which it came.
"""

import asyncio
import math
from dataclasses import dataclass, field

from laminar_py.records.engine import EngineStatus
from laminar_py.records.protocols import Clock
from laminar_py.records.replica import Assignment, Progress, ReplicaReport, WeightLoad

GATHER_S = 0.1


@dataclass(slots=True, kw_only=True)
class Outbox:
    """News of a replica, e.g. `Outbox(index=0, clock=clock)`; bounded by what it runs between two reports."""

    index: int
    clock: Clock
    gather_s: float = GATHER_S  # in which news gathers for a report
    progress: list[Progress] = field(default_factory=list)
    loads: list[WeightLoad] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # trajectories whose version is nowhere any more
    generated: int = 0  # training tokens
    urgent: asyncio.Event = field(default_factory=asyncio.Event)  # something is to be told
    _awaited: asyncio.Event = field(default_factory=asyncio.Event)  # and somebody stands still until it is told
    _last_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Begin the first interval."""
        self._last_s = self.clock.now()

    async def wait(self, timeout_s: float) -> None:
        """Return when something is urgent, else after `timeout_s`.

        Never so soon that short trajectories do not share one, unless it is awaited.
        """
        if not self.urgent.is_set():
            await _set_within(self.urgent, timeout_s)
        if not self._awaited.is_set():
            await _set_within(self._awaited, self._last_s + self.gather_s - self.clock.now())
        self.urgent.clear()
        self._awaited.clear()

    def begin(self, item: Assignment, version: int) -> None:
        """Tell the version of a trajectory's first token."""
        self.progress.append(
            Progress(trajectory_id=item.trajectory_id, epoch=item.epoch, start=item.length, begun=version)
        )
        self.urgent.set()

    def at_once(self) -> None:
        """Let the next report go out without waiting for others to share it."""
        self.urgent.set()
        self._awaited.set()

    def take(self, status: EngineStatus, *, admissible: int, received: int) -> ReplicaReport:
        """The report of everything so far."""
        self._last_s = self.clock.now()
        report = ReplicaReport(
            replica=self.index,
            status=status,
            admissible=admissible,
            received=received,
            progress=tuple(self.progress),
            loads=tuple(self.loads),
            lost=tuple(self.lost),
            generated=self.generated,
        )
        self.progress, self.loads, self.lost, self.generated = [], [], [], 0
        return report


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Return once an event is set, which the end of so many seconds does itself; at once where there are none."""
    if seconds <= 0:
        return
    if seconds == math.inf:
        await event.wait()
        return
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()
