"""Set-up of a controller: its queues, its scheduler, the objects of training, and the first events on record."""

import asyncio
import gc
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from laminar_py.control.groups import Credit
from laminar_py.control.lease import DeviceLease, make_lease
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.settings import control_settings
from laminar_py.learner.losses.advantages import group_advantages, overlong_cost
from laminar_py.ledger.database import LedgerError
from laminar_py.ledger.recovery import Recovered, first_events
from laminar_py.ledger.seal import seal_run
from laminar_py.records.columns import MODEL_COLUMNS
from laminar_py.records.scoring import GroupRewards
from laminar_py.records.trajectory import Prompt, TrajectoryRef
from laminar_py.repack.migration import Migration
from laminar_py.runtime.orchestrator.requests import SettingRequests
from laminar_py.runtime.orchestrator.trainer import Trainer
from laminar_py.runtime.orchestrator.versions import Versions
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.learner import FrozenStage, LearnerKeeper
from laminar_py.runtime.workers.replicas import Replicas

log = logging.getLogger(__name__)

Item = TypeVar("Item")

COLLECT_S = 60.0  # between collections of reference cycles
TURN_S = 0.001  # how long a thread computes while another thread waits for the GIL
NEVER = 1_000_000_000  # threshold of the oldest generation that is never reached


class Handoff(Generic[Item]):
    """Queue of one item between two tasks: `hand_over` returns once the reader asks for the next item."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[Item, asyncio.Event]] = asyncio.Queue(1)

    async def hand_over(self, item: Item) -> None:
        """Hand an item over, and wait until the reader asks for the next one."""
        done = asyncio.Event()
        await self._queue.put((item, done))
        await done.wait()

    async def items(self) -> AsyncIterator[Item]:
        """Yield items until cancelled; asking for the next item lets `hand_over` of the last one return."""
        while True:
            item, done = await self._queue.get()
            yield item
            done.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """The objects of a run that an evaluation does not have: learner, versions, trainer, repacking, changes."""

    learner: LearnerKeeper
    versions: Versions
    trainer: Trainer
    migration: Migration
    requests: SettingRequests


def make_scheduler(
    incarnation: Incarnation,
    *,
    submit_for_scoring: Callable[[TrajectoryRef, Prompt], None],
    frozen: Sequence[FrozenStage],
    versions_return: bool = False,
    fail: Callable[[str], None],
    on_fault: Callable[[str], None] = log.error,
) -> TrajectoryScheduler:
    """Make the scheduler of trajectories; in a resumed run it waits for `restore`.

    `fail` is called with a reason if all trajectories fail, so that the run ends. `on_fault` gets the fault of the
    draws on record, and of the first group that is drawn wrongly (law 13).
    """
    config, inputs = incarnation.config, incarnation.inputs
    algorithm, sampling = config.algorithm, config.rollout.sampling
    settings = control_settings(config, stop_ids=inputs.tokenizer.eos_ids)
    draws = incarnation.draws
    if draws is not None and draws.fault:
        on_fault(draws.fault)

    def check_draw(group: str, prompt: Prompt) -> None:
        if draws is not None and (fault := draws.issued(group, prompt.index, prompt.id)):
            on_fault(fault)

    def record_group(group: GroupRewards) -> None:
        inputs.stream.record_group(group)
        incarnation.stats.add_group(group)

    scheduler = TrajectoryScheduler(
        replace(settings, versions_return=versions_return),
        prompt_at=inputs.stream.prompt,
        on_issued=check_draw,
        on_rewards=record_group,
        on_failing=fail,
        recorder=incarnation.ledger,
        submit_for_scoring=submit_for_scoring,
        submit_for_columns={MODEL_COLUMNS[stage.source]: stage.submit_trajectory for stage in frozen},
        credit=Credit(
            group_advantages(algorithm.advantage),
            overlong_cost(sampling.max_new_tokens, algorithm.overlong_tokens),
        ),
        clock=incarnation.clock,
    )
    if incarnation.number > 1:
        scheduler.await_restore()
    return scheduler


def lease_devices(incarnation: Incarnation, replicas: Replicas, learner: LearnerKeeper) -> DeviceLease:
    """Make the lease of devices that the learner shares with replicas, which begins with the learner's turn."""
    replicas.shared.await_learner(lambda: learner.gpus)
    return make_lease(
        incarnation.config, replicas.shared, clock=incarnation.clock, record=incarnation.ledger.append
    )


async def record_start(incarnation: Incarnation, recovered: Recovered | None) -> None:
    """Record that an incarnation begins, and which events of the one before it undoes."""
    checkpoint = incarnation.checkpoint
    begun = first_events(
        incarnation.config,
        incarnation=incarnation.number,
        host=socket.gethostname(),
        data=incarnation.inputs.digests,
        resumed_step=checkpoint.step if checkpoint else None,
        overrides=incarnation.overrides,
        command_s=round(time.time() - psutil.Process().create_time(), 3),
    )
    incarnation.ledger.append_all([*begun, *(recovered.events if recovered else ())])
    await incarnation.ledger.commit()


def seal(run: Path) -> None:
    """Write sizes and digests of an ended run's files into its folder; log a warning if that fails."""
    try:
        seal_run(run)
    except LedgerError as error:  # a run without a seal is still valid
        log.warning("%s", error)


async def limit_gc_pauses() -> None:
    """Keep Python's garbage collector and threads from delaying the event loop, until cancelled.

    By default a full collection runs whenever the number of objects has grown by a quarter. With 10,000 live
    trajectories each one blocks the event loop for 0.1 s, so full collections run once a minute instead. Threads
    release the GIL after `TURN_S`, where Python's default is 5 ms.
    """
    turn_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(TURN_S)
    gc.freeze()
    gc.set_threshold(*thresholds[:2], NEVER)
    try:
        while True:
            await asyncio.sleep(COLLECT_S)
            gc.collect()
    finally:
        sys.setswitchinterval(turn_s)
        gc.set_threshold(*thresholds)
