"""An incarnation of a run: all that its parts share from a start of the controller to its end."""

import socket
from dataclasses import dataclass

from laminar_py.config.run import RunConfig
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.recovery import Recovered, closed_groups
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.observe.stats import Stats, read_totals
from laminar_py.records.events import Checkpointed
from laminar_py.records.host import SystemClock
from laminar_py.runtime.cluster.memory import KernelKills
from laminar_py.runtime.cluster.part import MakePart
from laminar_py.runtime.cluster.placement import Placement
from laminar_py.runtime.preflight.inputs import Inputs
from laminar_py.runtime.workers.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class PartKinds:
    """Parts that a benchmark has others in the place of; None: those of any run."""

    replica: MakePart | None = None
    scorer: type | None = None  # an actor


NO_KINDS = PartKinds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A run that is about to be led, or gone on with if it is `resumed`; a controller is made of it."""

    config: RunConfig
    run: RunFolder
    placement: Placement
    inputs: Inputs
    resumed: bool
    kinds: PartKinds = NO_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """Made by `open_incarnation`, handed to all parts of the controller and to the owners of the processes."""

    config: RunConfig
    run: RunFolder
    placement: Placement
    inputs: Inputs
    clock: SystemClock
    ledger: Ledger
    stats: Stats
    supervisor: Supervisor
    kernel_kills: KernelKills
    kinds: PartKinds = NO_KINDS
    number: int = 1
    checkpoint: Checkpointed | None = None  # where the learner goes on


def open_incarnation(opened: Opened, *, recovered: Recovered | None) -> Incarnation:
    """A run's first incarnation, or the next one after what was `recovered` from its ledger."""
    config, run, inputs = opened.config, opened.run, opened.inputs
    if recovered is not None and inputs.stream.learns:
        for group in closed_groups(run.live_ledger):
            inputs.stream.record_group(group)
    clock = SystemClock()
    checkpoint = recovered.checkpoint if recovered else None
    copy = None if run.live_ledger == run.ledger else run.ledger
    ledger = Ledger(run.live_ledger, host=socket.gethostname(), clock=clock, copy=copy)
    totals = read_totals(run.metrics, checkpoint.step if checkpoint else 0)
    return Incarnation(
        config=config,
        run=run,
        placement=opened.placement,
        inputs=inputs,
        clock=clock,
        ledger=ledger,
        stats=Stats(clock, replicas=config.rollout.replicas, totals=totals),
        supervisor=Supervisor(record=ledger.append, max_restarts=config.supervisor.max_restarts),
        kernel_kills=KernelKills(),
        kinds=opened.kinds,
        number=recovered.incarnation if recovered else 1,
        checkpoint=checkpoint,
    )
