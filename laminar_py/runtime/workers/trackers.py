"""Trackers of a run, each in a process of its own, and the messages to them. Owned by the controller.

No part of a run waits for a tracker, and no tracker can end a run. Messages wait in a bounded queue; a
slow or crashed tracker loses messages, which are counted. A new process continues the tracker's run.
"""

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress

from laminar_py.config.tracking import Opening
from laminar_py.observe.summary import Summary
from laminar_py.observe.trackers import (
    Ending,
    Message,
    Rewound,
    Values,
    flat_evaluation,
    flat_row,
    flat_settings,
    flat_summary,
)
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import StepRow
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.cluster.placement import NodeSlot
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper
from laminar_py.runtime.workers.specs import TrackerSpec

log = logging.getLogger(__name__)

QUEUED = 1000  # messages of some 5 kB; a full queue drops the newest, so no caller waits
RETRY_S = 60.0  # before a restart
CLOSE_S = 30.0  # to deliver the queue and to end the tracker's run
FAILED_CLOSE_S = 5.0


class TrackerKeeper(Keeper):
    """A tracker in a process of its own on the controller's node; it answers each message before the next."""

    actor_class = "laminar_py.runtime.workers.processes.services:TrackerActor"
    concurrency = 1
    timeout_s = 600.0  # the server of a tracker may be slow
    on_record = False

    def __init__(
        self, opening: Opening, incarnation: Incarnation, *, queued: int = QUEUED, retry_s: float = RETRY_S
    ) -> None:
        super().__init__(incarnation, f"tracker-{opening.kind}")
        self._opening = opening
        self._retry_s = retry_s
        self._queue: asyncio.Queue[Message] = asyncio.Queue(queued)
        self._sent = self._delivered = 0  # messages
        self._warned = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def undelivered(self) -> int:
        """Number of messages that were dropped, were lost in a crash, or wait."""
        return self._sent - self._delivered

    def start(self) -> None:
        """Start to deliver, in a task outside the run's group, so that a failing tracker does not end the run."""
        self._task = asyncio.create_task(self.keep(), name=f"tracker-{self._opening.kind}")

    def enqueue_message(self, message: Message) -> None:
        """Queue a message, or drop it if the queue is full; returns at once."""
        self._sent += 1
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self._warn(f"{self._queue.qsize()} wait for it")

    async def close(self, summary: dict[str, float] | None, *, limit_s: float) -> None:
        """Deliver the queue and the summary within `limit_s`; then end the process."""
        assert self._task is not None, "a tracker is started before it is closed"
        self._closing.set()
        self._sent += 1
        try:
            async with asyncio.timeout(limit_s):
                await self._queue.put(Ending(summary))
                await asyncio.wait([self._task])
        except TimeoutError:
            self._warn(f"it was not done {limit_s:g} s after the run")
        finally:
            self._task.cancel()
            self.kill()
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.warning("tracker %s: %s: %s", self._opening.kind, type(error).__name__, error)
        if self.undelivered:
            log.warning("tracker %s: %d messages did not arrive", self._opening.kind, self.undelivered)

    def places(self) -> Sequence[NodeSlot | None]:
        """Return the controller's node."""
        return [self._placement.here]

    async def start_parts(self, parts: Sequence[Part]) -> None:
        """Open the tracker's run with the credentials and addresses in this process's environment."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        await parts[0].call("start", TrackerSpec(self._opening, environment))

    async def watch(self, parts: Sequence[Part]) -> None:
        """Deliver messages up to `Ending`. Raises PartCrashedError, and then the message in delivery is lost."""
        message: Message | None = None
        while not isinstance(message, Ending):
            message = await self._queue.get()
            await parts[0].call("deliver", message, timeout_s=math.inf)
            self._delivered += 1

    async def clean_up(self, error: PartCrashedError) -> None:
        """Log a crash, which does not count against the run; raise it after the run's end, to stop restarts."""
        self._warn(f"its process crashed ({error.reason}), see logs/{error.part}.log")
        if self._closing.is_set():
            raise error

    async def wait_before_restart(self, failures: int) -> None:
        """Wait `retry_s`, or until the run is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._retry_s):
                await self._closing.wait()

    def _warn(self, reason: str) -> None:
        """Log the first reason for which messages are dropped."""
        if not self._warned:
            log.warning("tracker %s: messages are dropped: %s", self._opening.kind, reason)
        self._warned = True


class Trackers:
    """Sends steps, evaluations and the summary to all trackers of a run."""

    def __init__(self, incarnation: Incarnation, *, resumed: bool) -> None:
        config, run = incarnation.config, incarnation.run
        project = config.tracking.project or config.name
        settings = flat_settings(config.model_dump(mode="json"))
        self._keepers = [
            TrackerKeeper(
                Opening(kind=kind, folder=str(run.path), name=run.name, project=project, settings=settings),
                incarnation,
            )
            for kind in config.tracking.kinds
        ]
        self._next = 0 if resumed else 1  # the expected step unless steps are undone; 0: no step is expected

    def start(self) -> None:
        """Start to deliver messages to all trackers."""
        for keeper in self._keepers:
            keeper.start()

    def step(self, row: StepRow) -> None:
        """Send a committed step; if it is not the next one, the trackers first undo the steps after it."""
        if row.step != self._next:
            self._enqueue_message(Rewound(row.step - 1))
        self._next = row.step + 1
        self._enqueue_message(Values(row.step, flat_row(row)))

    def evaluated(self, result: Evaluated) -> None:
        """Send an evaluation, at the step of its version, which may be long past."""
        self._enqueue_message(Values(result.step, flat_evaluation(result)))

    async def close(self, summary: Summary | None) -> None:
        """Deliver the summary to all trackers and end them; None means that the run failed."""
        values = None if summary is None else flat_summary(summary)
        limit_s = FAILED_CLOSE_S if summary is None else CLOSE_S
        await asyncio.gather(*(keeper.close(values, limit_s=limit_s) for keeper in self._keepers))

    def _enqueue_message(self, message: Message) -> None:
        for keeper in self._keepers:
            keeper.enqueue_message(message)
