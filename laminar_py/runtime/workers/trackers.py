"""Messages of a run to its trackers, and the processes that they are in. Owned by the controller.

Invariant: nothing in a run waits for a tracker (law 8), and none can end it. What is told waits in a bounded
queue; a tracker that is slow or gone costs its own messages, which are counted. A tracker's process that dies is
started anew, and goes on with the tracker's run.
"""

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress

from laminar_py.observe.summary import Summary
from laminar_py.observe.trackers import (
    Ending,
    Message,
    Opening,
    Rewound,
    Values,
    flat_evaluation,
    flat_row,
    flat_settings,
    flat_summary,
)
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import StepRow
from laminar_py.runtime.cluster.errors import PartDiedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.specs import TrackerSpec

log = logging.getLogger(__name__)

QUEUED = 1000  # messages of some 5 kB; when it is full the newest is dropped, so nobody ever waits to put one in
RETRY_S = 60.0  # after a death
START_S = 600.0  # a server may be slow to answer
CLOSE_S = 30.0  # for all that is queued and the tracker's own end
FAILED_CLOSE_S = 5.0


class TrackerLink:
    """A tracker in a process of its own on the controller's node; messages go one by one, each is answered."""

    def __init__(
        self, opening: Opening, incarnation: Incarnation, *, queued: int = QUEUED, retry_s: float = RETRY_S
    ) -> None:
        self._opening = opening
        self._retry_s = retry_s
        self._queue: asyncio.Queue[Message] = asyncio.Queue(queued)
        self._told = self._delivered = 0  # messages
        self._warned = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        spec = PartSpec(
            names=[f"tracker-{opening.kind}"],
            actor="laminar_py.runtime.workers.processes.services:TrackerActor",
            concurrency=1,
            timeout_s=START_S,
            places=lambda: [incarnation.placement.here],
            start=self._open,
            settle=self._settle,
            rest=self._rest,
            on_record=False,
        )
        self._keeper = Keeper(spec, incarnation)

    @property
    def undelivered(self) -> int:
        """Messages that were dropped, or wait."""
        return self._told - self._delivered

    def start(self) -> None:
        """Begin to deliver. Not a task of the run's group: its fate must not be the run's."""
        work = self._keeper.calling(self._deliver)
        self._task = asyncio.create_task(work, name=f"tracker-{self._opening.kind}")

    def tell(self, message: Message) -> None:
        """Never waits."""
        self._told += 1
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self._warn(f"{self._queue.qsize()} wait for it")

    async def close(self, summary: dict[str, float] | None, *, limit_s: float) -> None:
        """Deliver what is queued and the summary, in this time at most; then its process is gone."""
        assert self._task is not None, "a tracker is started before it is closed"
        self._closing.set()
        self._told += 1
        try:
            async with asyncio.timeout(limit_s):
                await self._queue.put(Ending(summary))
                await asyncio.wait([self._task])
        except TimeoutError:
            self._warn(f"it was not done {limit_s:g} s after the run")
        finally:
            self._task.cancel()
            self._keeper.kill()
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.warning("tracker %s: %s: %s", self._opening.kind, type(error).__name__, error)
        if self.undelivered:
            log.warning("tracker %s: %d messages did not arrive", self._opening.kind, self.undelivered)

    async def _deliver(self, parts: Sequence[Part]) -> None:
        """Pass messages on, up to the last. Raises PartDiedError; the message that it was over is lost."""
        message: Message | None = None
        while not isinstance(message, Ending):
            message = await self._queue.get()
            await parts[0].call("deliver", message, timeout_s=math.inf)
            self._delivered += 1

    async def _settle(self, error: PartDiedError) -> None:
        """Say what is lost, which the run does not count; once it is over nobody takes the place of the dead."""
        self._warn(f"its process died ({error.reason}), see logs/{error.part}.log")
        if self._closing.is_set():
            raise error

    async def _open(self, parts: Sequence[Part]) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        await parts[0].call("start", TrackerSpec(self._opening, environment))

    async def _rest(self, failures: int) -> None:
        """Wait a while after a death; not once the run is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._retry_s):
                await self._closing.wait()

    def _warn(self, reason: str) -> None:
        if not self._warned:
            log.warning("tracker %s: messages are dropped: %s", self._opening.kind, reason)
        self._warned = True


class Trackers:
    """Trackers of a run."""

    def __init__(self, incarnation: Incarnation, *, resumed: bool) -> None:
        config, run = incarnation.config, incarnation.run
        project = config.tracking.project or config.name
        settings = flat_settings(config.model_dump(mode="json"))
        self._links = [
            TrackerLink(
                Opening(kind=kind, folder=str(run.path), name=run.name, project=project, settings=settings),
                incarnation,
            )
            for kind in config.tracking.kinds
        ]
        self._next = 0 if resumed else 1  # the step that comes if nothing is undone; 0: none does

    def start(self) -> None:
        """Begin to deliver."""
        for link in self._links:
            link.start()

    def step(self, row: StepRow) -> None:
        """Tell a committed step. One that is not the next was rolled back to, or resumed from."""
        if row.step != self._next:
            self._tell(Rewound(row.step - 1))
        self._next = row.step + 1
        self._tell(Values(row.step, flat_row(row)))

    def evaluated(self, result: Evaluated) -> None:
        """Tell an evaluation, at the step of its version, which may be long past."""
        self._tell(Values(result.step, flat_evaluation(result)))

    async def close(self, summary: Summary | None) -> None:
        """End all; without a summary the run failed."""
        values = None if summary is None else flat_summary(summary)
        limit_s = FAILED_CLOSE_S if summary is None else CLOSE_S
        await asyncio.gather(*(link.close(values, limit_s=limit_s) for link in self._links))

    def _tell(self, message: Message) -> None:
        for link in self._links:
            link.tell(message)
