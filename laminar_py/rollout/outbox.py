"""The outbox gathers a replica's news into reports for the controller. `rollout.replica` owns it.

News are progress of trajectories, loaded versions and lost versions. Each is in exactly one report, in order
(`tests/rollout/test_replica.py`).
"""

import asyncio
import math
from dataclasses import dataclass, field

from laminar_py.records.engine import EngineStatus
from laminar_py.records.events import VersionLoaded
from laminar_py.records.host import Clock
from laminar_py.records.proofs import ProbeAnswer
from laminar_py.records.replica import Assignment, Progress, ReplicaReport

GATHER_S = 0.1


@dataclass(slots=True, kw_only=True)
class Outbox:
    """News since the last report, e.g. `Outbox(index=0, clock=clock)`; bounded by the replica's trajectories."""

    index: int
    clock: Clock
    gather_s: float = GATHER_S  # least time between two reports, except after `flush_now`
    progress: list[Progress] = field(default_factory=list)
    loads: list[VersionLoaded] = field(default_factory=list)
    probes: list[ProbeAnswer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # ids of trajectories whose version no relay has
    generated: int = 0  # training tokens
    urgent: asyncio.Event = field(default_factory=asyncio.Event)  # there is news to report
    _flushed: asyncio.Event = field(default_factory=asyncio.Event)  # the next report must not gather more news
    _last_s: float = field(init=False)  # time of the last report

    def __post_init__(self) -> None:
        """Start the first interval."""
        self._last_s = self.clock.now()

    async def wait(self, timeout_s: float) -> None:
        """Return when the next report is due: when there is urgent news, else after `timeout_s`.

        Urgent news waits until `gather_s` after the last report or `flush_now`, so that short trajectories share a
        report.
        """
        if not self.urgent.is_set():
            await _set_within(self.urgent, timeout_s)
        if not self._flushed.is_set():
            await _set_within(self._flushed, self._last_s + self.gather_s - self.clock.now())
        self.urgent.clear()
        self._flushed.clear()

    def report_first_token(self, item: Assignment, version: int) -> None:
        """Add the version of a trajectory's first token here, and make the news urgent."""
        self.progress.append(
            Progress(trajectory_id=item.trajectory_id, epoch=item.epoch, start=item.length, begun=version)
        )
        self.urgent.set()

    def flush_now(self) -> None:
        """Let the next report leave now, without gathering more news."""
        self.urgent.set()
        self._flushed.set()

    def pop_report(self, status: EngineStatus, *, admissible: int, received: int) -> ReplicaReport:
        """Return a report of all news so far, with the engine's status and the free places; empty the outbox."""
        self._last_s = self.clock.now()
        report = ReplicaReport(
            replica=self.index,
            status=status,
            admissible=admissible,
            received=received,
            progress=tuple(self.progress),
            loads=tuple(self.loads),
            lost=tuple(self.lost),
            probes=tuple(self.probes),
            generated=self.generated,
        )
        self.progress, self.loads, self.lost, self.probes, self.generated = [], [], [], [], 0
        return report


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, and set it after `seconds` at the latest; return at once if `seconds` is not positive."""
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
