"""Changes of settings that a user asks of a running run, by `laminar set` and `laminar scale`.

Owned by the controller. The commands leave sets of `key=value` in the run's folder (`ledger.requests`), which stay
there until they are on record. A set is checked as one. A change of the fleet begins at once. Ranks of the learner
wait for GPUs, and the trainer makes that change. Other settings wait until the learner has no batch, so that each
batch follows one bound on staleness (law 12). The trainer calls `stepped` after each step, which also lets
`staleness.control` change settings.
"""

import asyncio
import logging
from collections.abc import Sequence

from laminar_py.config.changes import RANKS, REPLICAS, changed, parse_change
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.control.consumption import StepBatch
from laminar_py.control.dispatcher import Throttle
from laminar_py.control.incoming import HOUSEKEEPING_S
from laminar_py.control.live_settings import USER, LiveSettings
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.ledger.requests import discard_old, forget_wanted, settings_by_hand, take_wanted
from laminar_py.records.metrics import StepRow
from laminar_py.runtime.orchestrator.alarms import Alarms
from laminar_py.runtime.orchestrator.fleet import ElasticFleet
from laminar_py.runtime.orchestrator.scoring import Scoring, max_scored
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import RETRY_S
from laminar_py.runtime.workers.learner import LearnerKeeper
from laminar_py.runtime.workers.replicas import Replicas

log = logging.getLogger(__name__)


class SettingRequests:
    """Takes requests, makes the changes, and shows a line about each."""

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        replicas: Replicas,
        scoring: Scoring,
        dispatch_loop: Throttle,
        alarms: Alarms,
        learner: LearnerKeeper,
    ) -> None:
        self._learner, self._placement = learner, incarnation.placement
        self._run, self._inputs, self._ledger = incarnation.run.path, incarnation.inputs, incarnation.ledger
        self._scoring, self._dispatch_loop, self._alarms = scoring, dispatch_loop, alarms
        self._replicas = replicas
        self._settings = LiveSettings(
            incarnation.config,
            scheduler=scheduler,
            show_line=self._show,
            publish_every=_written_publish_every(incarnation),
            held=settings_by_hand(incarnation.run, incarnation.overrides) if incarnation.number > 1 else (),
        )
        self._fleet = ElasticFleet(
            incarnation,
            settings=self._settings,
            scheduler=scheduler,
            replicas=replicas,
            scoring=scoring,
            dispatch_loop=dispatch_loop,
            show_line=alarms.show_line,
        )
        self._waiting: list[tuple[int, list[str]]] = []  # sets for the end of a step, with numbers of their files
        self._ranks_file: int | None = None  # number of the file with the wanted ranks
        self._next_look_s = 0.0  # when to look for room for them
        self._taken = set[int]()  # numbers of files with settings that are not on record yet
        self._number = 0  # of the next file

    async def run(self) -> None:
        """Take requests, and remove leaving replicas, until cancelled."""
        if old := await asyncio.to_thread(discard_old, self._run):
            self._show(f"{' '.join(old)}: was asked of an earlier controller, and is discarded; ask again")
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            if wanted := await asyncio.to_thread(take_wanted, self._run, self._number):
                self._taken.add(self._number)
                for settings in wanted:
                    await self._take(settings)
                self._number += 1
            if self._learner.requested is not None:
                await self._find_room(self._learner.requested)
            if self._settings.may_change:
                self._change_waiting()
            await self._forget_recorded()
            await self._fleet.end_leaving()

    def stepped(self, row: StepRow, batch: StepBatch) -> None:
        """Make the changes that are due after a committed step."""
        self._change_waiting()
        self._alarms.tell("staleness", "learner", self._settings.stepped(row, batch))

    def unquantize(self) -> None:
        """Start all replicas again, without quantisation; trajectories continue at the last token on record."""
        self._settings.unquantize()
        self._replicas.config = self._settings.config
        self._replicas.restart()

    def went_back(self) -> None:
        """Let `staleness.control` measure again, after the learner went back to a checkpoint."""
        self._settings.begin_again()

    async def _take(self, settings: Sequence[str]) -> None:
        """Check a set of settings; change the fleet, and keep the others for the end of the learner's step."""
        try:
            changed(self._settings.config, *(one for _, waiting in self._waiting for one in waiting), *settings)
            values = dict(map(parse_change, settings))
            if REPLICAS in values:
                self._show(await self._fleet.resize(values[REPLICAS]))
            if RANKS in values:
                self._request_ranks(values[RANKS])
            if others := [f"{name}={value}" for name, value in values.items() if name not in (REPLICAS, RANKS)]:
                self._waiting.append((self._number, others))
        except ConfigError as error:
            self._show(str(error))

    def _request_ranks(self, ranks: int) -> None:
        """Request so many ranks of the learner, in place of an earlier request."""
        if not self._learner.request(ranks):
            self._show(f"{RANKS} is {ranks} already")
            return
        self._ranks_file, self._next_look_s = self._number, 0.0
        if not self._placement.has_room(ranks):
            self._show(f"{RANKS}={ranks}: waits until so many GPUs are free")

    async def _find_room(self, ranks: int) -> None:
        """Look every `RETRY_S` whether there is room for so many ranks; the learner then resizes."""
        now = asyncio.get_running_loop().time()
        if now >= self._next_look_s:
            self._next_look_s = now + RETRY_S
            await self._placement.refresh(age_s=RETRY_S)  # a node may have joined
            if ranks == self._learner.requested and self._placement.has_room(ranks):
                self._learner.resizing.set()

    def _change_waiting(self) -> None:
        """Make the changes that waited, in the order of their requests, and record other ranks of the learner."""
        waiting, self._waiting = self._waiting, []
        changes = [settings for _, settings in waiting]
        ranks = self._learner.num_ranks
        if ranks != self._settings.config.learner.world_size:
            changes.append([f"{RANKS}={ranks}"])
        if self._learner.requested is None:
            self._ranks_file = None
        for settings in changes:
            try:
                self._show(self._settings.change(*settings, by=USER))
            except ConfigError as error:
                self._show(str(error))

    async def _forget_recorded(self) -> None:
        """Delete files of settings once these are on disk in the ledger."""
        if done := self._taken - {number for number, _ in self._waiting} - {self._ranks_file}:
            await self._ledger.commit()
            for number in done:
                await asyncio.to_thread(forget_wanted, self._run, number)
            self._taken -= done

    def _show(self, line: str) -> None:
        """Log and show a line about a change, which may let more groups begin."""
        log.info("%s", line)
        self._alarms.show_line(line)
        self._scoring.grow(max_scored(self._settings.config, self._inputs))
        self._dispatch_loop.wake()


def _written_publish_every(incarnation: Incarnation) -> int:
    """Return the steps between two versions that the config or this resume says, without later changes."""
    file = incarnation.run.config
    if incarnation.number == 1 or not file.is_file():
        return incarnation.config.learner.publish_every
    return load_config(file, list(incarnation.overrides)).learner.publish_every
