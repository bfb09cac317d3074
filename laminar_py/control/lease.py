"""Turns of the learner and of replicas on devices that they share (`cluster.share`). Pure but for its clock.

    REPLICAS --the learner has a batch, and `DeviceLease.take` finds that its turn has come--> LEARNER
    LEARNER  --it has none, and calls `give`-------------------------------------------------> REPLICAS

A run begins with the learner's turn. During it the shared replicas hold their requests, start no process and load
no weights. Responses lose nothing by a hand-over; a released KV cache is computed again.
"""

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from laminar_py.config.cluster import LeaseConfig, LeaseSwitch
from laminar_py.config.run import RunConfig
from laminar_py.control.consumption import StepBatch
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.records.events import Leased
from laminar_py.records.host import Clock

log = logging.getLogger(__name__)

# guesses; experiments/shared compares policies, not these values
GRACE_S = 0.05  # for which the learner keeps shared devices without a batch
LOOK_S, LOOK_SHARE = 0.1, 0.005  # between looks for the learner's turn: seconds, or a share of the present turn
TAIL = 0.5  # of the most trajectories that replicas ran in a turn
SMOOTHING = 0.3  # weight of the newest hand-over in the mean


class Holder(StrEnum):
    """Who computes on shared devices."""

    LEARNER = "learner"
    REPLICAS = "replicas"


class SharedFleet(Protocol):
    """The replicas on shared devices."""

    async def hold(self) -> None:
        """Stop all shared replicas, also starting ones; return once none computes."""
        ...

    async def release(self) -> None:
        """Let shared replicas compute and start; return once most released caches are complete."""
        ...

    def load(self) -> tuple[int, int]:
        """Return the trajectories on shared replicas, and the tokens of these so far."""
        ...


class DeviceLease:
    """The shared devices' holder; `record` gets an event for each hand-over. Without a fleet nothing is shared."""

    def __init__(
        self,
        fleet: SharedFleet | None,
        settings: LeaseConfig,
        *,
        clock: Clock,
        record: Callable[[Leased], None],
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._peak = 0  # most trajectories on shared replicas that were seen in the present turn
        self._clock = clock
        self._record = record
        self._cost_s = 0.0  # of a turn's two hand-overs, in the mean
        self._taken_s = 0.0  # of the last hand-over to the learner
        self._since_s = clock.now()  # when the present turn began
        self.holder = Holder.LEARNER

    async def take(self, step: int, *, at_once: bool = False) -> None:
        """Wait for the learner's turn unless it must have it `at_once`, and stop the replicas.

        A cancelled wait leaves their turn as it was.
        """
        if self._fleet is None or self.holder is Holder.LEARNER:
            return
        if not at_once:
            await self._await_turn(self._fleet)
        began, (_, tokens) = self._clock.now(), self._fleet.load()
        log.info("shared devices: the learner asks for them")
        try:
            await self._fleet.hold()
        except asyncio.CancelledError:
            await self._fleet.release()
            raise
        self._taken_s = self._hand_over(Holder.LEARNER, step, began, tokens)

    async def give(self, step: int) -> None:
        """End the learner's turn, if it is."""
        if self._fleet is None or self.holder is Holder.REPLICAS:
            return
        began, (self._peak, tokens) = self._clock.now(), self._fleet.load()
        log.info("shared devices: the learner gives them back")
        self.holder = Holder.REPLICAS  # also if the wait below is cancelled
        try:
            await self._fleet.release()
        finally:
            cost_s = self._taken_s + self._hand_over(Holder.REPLICAS, step, began, tokens)
            self._cost_s += SMOOTHING * (cost_s - self._cost_s) if self._cost_s else cost_s

    async def _await_turn(self, fleet: SharedFleet) -> None:
        """Wait until the replicas give up the devices for a batch that is ready."""
        while True:
            running, _ = fleet.load()
            self._peak = max(self._peak, running)
            if self._is_due(running):
                return
            await asyncio.sleep(max(LOOK_S, LOOK_SHARE * (self._clock.now() - self._since_s)))

    def _is_due(self, running: int) -> bool:
        if running <= TAIL * self._peak:
            return True
        spent_s = self._clock.now() - self._since_s
        return self._settings.switch is LeaseSwitch.READY and self._cost_s <= self._settings.most_cost * spent_s

    def _hand_over(self, holder: Holder, step: int, began: float, tokens: int) -> float:
        """Note the new holder; return the seconds since `began`."""
        self.holder, self._since_s = holder, self._clock.now()
        elapsed_s = self._since_s - began
        log.info("shared devices: now of the %s, after %.3f s", holder, elapsed_s)
        self._record(Leased(holder=holder.value, step=step, elapsed_s=elapsed_s, tokens=tokens))
        return elapsed_s


def make_lease(
    config: RunConfig, fleet: SharedFleet, *, clock: Clock, record: Callable[[Leased], None]
) -> DeviceLease:
    """Make the lease of devices that the learner shares with replicas; most runs share none."""
    shared = fleet if config.shared_replicas else None
    return DeviceLease(shared, config.cluster.lease, clock=clock, record=record)


async def leased_batch(
    lease: DeviceLease, scheduler: TrajectoryScheduler, *, groups: int, version: int, step: int
) -> StepBatch:
    """Take the next batch, and the devices that learner and replicas share.

    The learner keeps the devices if the next batch is there already. A cancelled call puts the batch back.
    """
    loop = asyncio.get_running_loop()
    asked_s = loop.time()
    take = asyncio.create_task(scheduler.next_batch(groups=groups, version=version), name="take-batch")
    try:
        if not (await asyncio.wait([take], timeout=GRACE_S))[0]:
            await lease.give(step)
        batch = await take
        if batch.trajectories:
            await lease.take(step)
        batch.waited_s = loop.time() - asked_s
        return batch
    except asyncio.CancelledError:
        take.cancel()
        await asyncio.wait([take])
        if not take.cancelled():
            await scheduler.consumption.put_back(take.result())
        raise
