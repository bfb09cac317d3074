"""An incarnation of a run: all that its parts share from a start of the controller to its end."""

import logging
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from laminar_py.config.run import RunConfig
from laminar_py.data.draws import Draws
from laminar_py.data.problems import missing_rows
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.recovery import Recovered, closed_groups, issued_groups
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.observe.stats import Stats, read_totals
from laminar_py.records.events import AnyEvent, Checkpointed, PartCrashed, PartStarted
from laminar_py.records.host import SystemClock
from laminar_py.runtime.cluster.errors import PartCrashedError, RunFailedError
from laminar_py.runtime.cluster.placement import Placement
from laminar_py.runtime.preflight.inputs import Inputs

log = logging.getLogger(__name__)


class Supervisor:
    """Counts crashes of parts, and ends the run when a part crashes too often; `record` appends to the ledger."""

    def __init__(self, *, record: Callable[[AnyEvent], None], max_restarts: int) -> None:
        self.restarts: Counter[str] = Counter()
        self._record = record
        self._max_restarts = max_restarts

    @property
    def total_restarts(self) -> int:
        """Number of restarts, over all parts."""
        return self.restarts.total()

    def started(self, part: str, pid: int) -> None:
        """Record that a part has started in the process `pid`."""
        self._record(PartStarted(part, pid))

    def crashed(self, error: PartCrashedError) -> None:
        """Record and count the crash of a part.

        Raises RunFailedError if it crashed more than `max_restarts` times.
        """
        self._record(PartCrashed(error.part, error.reason))
        self.restarts[error.part] += 1
        log.warning("%s crashed (%s), restart %d", error.part, error.reason, self.restarts[error.part])
        if self.restarts[error.part] > self._max_restarts:
            raise RunFailedError(
                f"{error.part} crashed {self.restarts[error.part]} times, last: {error.reason}; see"
                f" logs/{error.part}.log, or raise supervisor.max_restarts={self._max_restarts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """A run that is about to start, or to resume; the argument of `Controller`."""

    config: RunConfig
    run: RunFolder
    placement: Placement
    inputs: Inputs
    resumed: bool
    overrides: tuple[str, ...] = ()  # settings that this resume changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """All that the controller's objects and the owners of processes share; made by `open_incarnation`."""

    config: RunConfig
    run: RunFolder
    placement: Placement
    inputs: Inputs
    clock: SystemClock
    ledger: Ledger
    stats: Stats
    supervisor: Supervisor
    overrides: tuple[str, ...] = ()
    number: int = 1
    checkpoint: Checkpointed | None = None  # from which the learner continues
    draws: Draws | None = None  # check of the groups that are issued, which knows those on record

    @property
    def made_steps(self) -> bool:
        """Whether earlier controllers of a run have made all its steps, so that at most evaluations are left."""
        return self.checkpoint is not None and self.checkpoint.step >= self.config.steps


def open_incarnation(start: RunStart, *, recovered: Recovered | None) -> Incarnation:
    """Open the ledger of a run's first incarnation, or of the next after the state `recovered` from the ledger.

    A stream that learns from rewards first gets all groups that earlier incarnations closed.
    """
    config, run, inputs = start.config, start.run, start.inputs
    if recovered is not None and inputs.stream.learns:
        for group in closed_groups(run.ledger):
            inputs.stream.record_group(group)
    draws = Draws(inputs.stream.problems, config.data, num_open=inputs.stream.num_open)
    draws.fault = missing_rows(inputs.stream.problems)
    if recovered is not None:
        draws.replay(issued_groups(run.ledger))
    draws.look_ahead(lambda place: inputs.stream.prompt(place).id)  # as the scheduler draws them
    clock = SystemClock()
    checkpoint = recovered.checkpoint if recovered else None
    ledger = Ledger(run.ledger, host=socket.gethostname(), clock=clock)
    totals = read_totals(run.metrics, checkpoint.step if checkpoint else 0)
    return Incarnation(
        config=config,
        run=run,
        placement=start.placement,
        inputs=inputs,
        clock=clock,
        ledger=ledger,
        stats=Stats(clock, replicas=config.rollout.replicas, totals=totals, ranks=config.learner.world_size),
        supervisor=Supervisor(record=ledger.append, max_restarts=config.supervisor.max_restarts),
        overrides=start.overrides,
        number=recovered.incarnation if recovered else 1,
        checkpoint=checkpoint,
        draws=draws,
    )
