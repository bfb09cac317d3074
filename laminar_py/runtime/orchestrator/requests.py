"""Changes of settings that a user asks of a running run, by `laminar set` and `laminar scale`.

Owned by the controller. The commands leave `key=value` lines in the run's folder (`ledger.requests`). A change of
the fleet begins at once. Another change waits until the learner has no batch, so that each batch follows one bound
on staleness (law 12). The trainer calls `stepped` after each step, which also lets `staleness.control` change
settings.
"""

import asyncio
import logging

from laminar_py.config.changes import REPLICAS, parse_change
from laminar_py.config.section import ConfigError
from laminar_py.control.consumption import StepBatch
from laminar_py.control.dispatcher import Throttle
from laminar_py.control.incoming import HOUSEKEEPING_S
from laminar_py.control.live_settings import USER, LiveSettings
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.ledger.requests import take_wanted
from laminar_py.records.metrics import StepRow
from laminar_py.runtime.orchestrator.alarms import Alarms
from laminar_py.runtime.orchestrator.fleet import ElasticFleet
from laminar_py.runtime.orchestrator.scoring import Scoring, max_scored
from laminar_py.runtime.workers.incarnation import Incarnation
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
    ) -> None:
        self._run, self._inputs, self._ledger = incarnation.run.path, incarnation.inputs, incarnation.ledger
        self._scoring, self._dispatch_loop, self._alarms = scoring, dispatch_loop, alarms
        self._settings = LiveSettings(incarnation.config, scheduler=scheduler, show_line=self._show)
        self._fleet = ElasticFleet(
            incarnation,
            settings=self._settings,
            scheduler=scheduler,
            replicas=replicas,
            scoring=scoring,
            dispatch_loop=dispatch_loop,
            show_line=alarms.show_line,
        )
        self._waiting: list[str] = []  # settings that wait for the end of a step; at most a few names

    async def run(self) -> None:
        """Take requests, and remove leaving replicas, until cancelled."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            for setting in await asyncio.to_thread(take_wanted, self._run):
                await self._take(setting)
            if self._waiting and self._settings.may_change:
                self._change_waiting()
                await self._ledger.commit()
            await self._fleet.end_leaving()

    def stepped(self, row: StepRow, batch: StepBatch) -> None:
        """Make the changes that are due after a committed step."""
        self._change_waiting()
        self._alarms.tell("staleness", "learner", self._settings.stepped(row, batch))

    async def _take(self, setting: str) -> None:
        """Change the fleet, or keep another setting for the end of the learner's step."""
        try:
            name, value = parse_change(setting)
            if name == REPLICAS:
                self._show(await self._fleet.resize(value))
            else:
                self._waiting.append(setting)
        except ConfigError as error:
            self._show(str(error))

    def _change_waiting(self) -> None:
        """Make the changes that waited, in the order of their requests."""
        waiting, self._waiting = self._waiting, []
        for setting in waiting:
            try:
                self._show(self._settings.change(setting, by=USER))
            except ConfigError as error:
                self._show(str(error))

    def _show(self, line: str) -> None:
        """Log and show a line about a change, which may let more groups begin."""
        log.info("%s", line)
        self._alarms.show_line(line)
        self._scoring.grow(max_scored(self._settings.config, self._inputs))
        self._dispatch_loop.wake()
