"""The record of a simulation: a run folder that report, audit and dashboard read like any other run.

Made by `simulate.run`. The code of real runs writes ledger, rows, summary and seal. Times are virtual, from the
start of the simulation. The first event marks the run as simulated (`tests/simulate/test_record.py`).
"""

import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager

from laminar_py.config import RunConfig
from laminar_py.ledger import (
    Ledger,
    Machine,
    RunFolder,
    append_row,
    first_events,
    new_run,
    open_rows,
    seal_run,
)
from laminar_py.observe import Stats, summarise, watch_fleet
from laminar_py.records import Prompt, StepRow
from laminar_py.records.events import AnyEvent, RunEnded
from laminar_py.records.host import Clock
from laminar_py.records.pieces import ColumnRef, TokensRef
from laminar_py.records.spans import Span

INCARNATION = 1  # a simulation has one controller process from its start to its end
HOST = "simulated"  # in place of a host's name


def new_simulated_run(config: RunConfig) -> RunFolder:
    """Make and lock the next `runs/simulated-<name>-<n>`, which `--resume` does not find. Raises `ConfigError`."""
    run = new_run(config.model_copy(update={"name": f"simulated-{config.name}"}))
    run.lock()
    return run


class SimulatedRecord:
    """The record in a run's folder. Callers call `begin`, `end` after a complete simulation, and `close`."""

    def __init__(self, config: RunConfig, run: RunFolder, *, clock: Clock, stats: Stats) -> None:
        self._config, self._run, self._stats = config, run, stats
        origin_s = time.time() - clock.now()
        self.ledger = Ledger(run.ledger, host=HOST, clock=clock, wall=lambda: origin_s + clock.now())
        self._rows = open_rows(run.metrics)
        self._has_ended = False

    async def begin(self) -> None:
        """Record the start of the simulation."""
        await self.ledger.start()
        self.ledger.append_all(
            first_events(self._config, incarnation=INCARNATION, host=HOST, data={}, simulated=True)
        )
        await self.ledger.commit()

    def watch_fleet(self, *, generated_tokens: Callable[[], int]) -> Coroutine[object, object, None]:
        """Write a row of the fleet every second, until cancelled."""
        return watch_fleet(self._run.fleet, self._stats, generated_tokens=generated_tokens, has_processes=False)

    def append_step(self, row: StepRow) -> None:
        """Write the row of a step."""
        append_row(self._rows, row)

    async def end(self, *, restarts: dict[str, int]) -> None:
        """Record the end, and write the summary."""
        self.ledger.append(RunEnded(INCARNATION, "finished"))
        await self.ledger.commit()
        summarise(self._run, self._stats, finished=True, restarts=restarts, sets=())
        self._has_ended = True

    async def close(self) -> None:
        """Close the files; seal the record if `end` was called."""
        self._rows.close()
        await self.ledger.close()
        if self._has_ended:
            seal_run(self._run.path)
        self._run.unlock()


class ObservedRecorder:
    """A recorder that also passes every event to `hear`; without a ledger it keeps no log."""

    def __init__(self, ledger: Ledger | None, *, hear: Callable[[AnyEvent], None]) -> None:
        self._ledger = ledger
        self._hear = hear
        self.machine = Machine() if ledger is None else ledger.machine

    def append(self, event: AnyEvent) -> None:
        """Record an event."""
        self._hear(event)
        if self._ledger is not None:
            self._ledger.append(event)
        else:
            self.machine.apply(0, event, wall=0.0, mono=0.0)

    def store_prompt(self, prompt: Prompt) -> None:
        """Record a prompt."""
        if self._ledger is not None:
            self._ledger.store_prompt(prompt)

    def store_tokens(self, trajectory_id: str, tokens: TokensRef, spans: tuple[Span, ...]) -> None:
        """Record the number of a trajectory's tokens and their versions."""
        (self._ledger or self.machine).store_tokens(trajectory_id, tokens, spans)

    def store_columns(self, trajectory_id: str, columns: Mapping[str, ColumnRef]) -> None:
        """Record where a trajectory's columns are."""
        (self._ledger or self.machine).store_columns(trajectory_id, columns)

    def together(self) -> AbstractContextManager[None]:
        """See `ledger.Ledger.together`."""
        return contextlib.nullcontext() if self._ledger is None else self._ledger.together()
