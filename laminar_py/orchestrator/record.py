"""First and last entries in the record of a run or an evaluation. Called by their controllers."""

import logging
import os
import socket
from hashlib import blake2b
from pathlib import Path

from laminar_py.config.rollout import OnNewWeights
from laminar_py.ledger.database import SCHEMA_VERSION, LedgerError
from laminar_py.ledger.recovery import Recovered
from laminar_py.ledger.seal import seal_run
from laminar_py.records.events import RunStarted, Scaled
from laminar_py.workers.incarnation import Incarnation

log = logging.getLogger(__name__)


async def record_start(incarnation: Incarnation, recovered: Recovered | None) -> None:
    """Put on record that an incarnation begins, and what it undoes of the one before."""
    config, checkpoint = incarnation.config, incarnation.checkpoint
    started = RunStarted(
        incarnation=incarnation.number,
        host=socket.gethostname(),
        pid=os.getpid(),
        schema=SCHEMA_VERSION,
        config_digest=blake2b(config.model_dump_json().encode(), digest_size=16).hexdigest(),
        drain=config.rollout.on_new_weights is OnNewWeights.DRAIN,
        max_staleness=config.staleness.enforced,
        resumed_step=checkpoint.step if checkpoint else None,
        data=incarnation.inputs.digests,
        eval_requests=config.eval.requests(config.rollout.sampling.params()),
    )
    fleet = Scaled(tuple(range(config.rollout.replicas)), config.rollout.engine.servers)
    incarnation.ledger.append_all([started, fleet, *(recovered.events if recovered else ())])
    await incarnation.ledger.commit()
    await incarnation.ledger.copy()


def seal(run: Path) -> None:
    """Seal the record of a run that nobody writes any more."""
    try:
        seal_run(run)
    except LedgerError as error:  # no reason to fail a run that is done
        log.warning("%s", error)
