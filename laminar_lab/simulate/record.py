"""The record of a simulation: a run folder that the report, the audit and the dashboard read like any other.

Owned by `simulate.run`. Ledger, rows, summary and seal are written by what writes them in any run; times are of
the virtual clock, from the moment on at which the simulation began. Invariant: the first event says that it was
simulated.
"""

import time
from collections.abc import Callable, Coroutine

from laminar_lab.simulate.learner import INCARNATION
from laminar_py.config import RunConfig
from laminar_py.ledger import (
    Ledger,
    RunFolder,
    append_row,
    first_events,
    ledger_disk,
    new_run,
    open_rows,
    place_ledger,
    seal_run,
)
from laminar_py.observe import Stats, summarise, watch_fleet
from laminar_py.records import StepRow
from laminar_py.records.events import RunEnded
from laminar_py.records.host import Clock

HOST = "simulated"  # in the place of a host's name


def new_simulated_run(config: RunConfig) -> RunFolder:
    """The next `runs/simulated-<name>-<n>`, locked; no run that `--resume` finds. Raises `ConfigError`."""
    disk = ledger_disk(config.runs, config.runs_local)
    run = new_run(config.model_copy(update={"name": f"simulated-{config.name}"}))
    run.lock()
    place_ledger(run, disk)
    return run


class SimulatedRecord:
    """Record in the folder of a run, from `begin` to `end`, and `close` once it has begun."""

    def __init__(self, config: RunConfig, run: RunFolder, *, clock: Clock, stats: Stats) -> None:
        self._config, self._run, self._stats = config, run, stats
        origin_s = time.time() - clock.now()
        copy = None if run.live_ledger == run.ledger else run.ledger
        self.ledger = Ledger(
            run.live_ledger, host=HOST, clock=clock, copy=copy, wall=lambda: origin_s + clock.now()
        )
        self._rows = open_rows(run.metrics)
        self._has_ended = False

    async def begin(self) -> None:
        """Put on record that a simulation begins."""
        await self.ledger.start()
        self.ledger.append_all(
            first_events(self._config, incarnation=INCARNATION, host=HOST, data={}, simulated=True)
        )
        await self.ledger.commit()

    def watch(self, *, generated_tokens: Callable[[], int]) -> Coroutine[object, object, None]:
        """Rows of the fleet, a second each, until cancelled."""
        return watch_fleet(self._run.fleet, self._stats, generated_tokens=generated_tokens, has_processes=False)

    def step(self, row: StepRow) -> None:
        """Keep the row of a step."""
        append_row(self._rows, row)

    async def end(self, *, restarts: dict[str, int]) -> None:
        """Put on record that it is over, and write its summary."""
        self.ledger.append(RunEnded(INCARNATION, "finished"))
        await self.ledger.commit()
        summarise(self._run, self._stats, finished=True, restarts=restarts, sets=())
        self._has_ended = True

    async def close(self) -> None:
        """Write what is left, and seal a record that was brought to its end."""
        self._rows.close()
        await self.ledger.close()
        if self._has_ended:
            seal_run(self._run.path)
        self._run.unlock()
