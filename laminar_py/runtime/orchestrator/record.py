"""First and last entries in the record of a run or an evaluation. Called by their controllers."""

import logging
import socket
from pathlib import Path

from laminar_py.ledger.database import LedgerError
from laminar_py.ledger.recovery import Recovered
from laminar_py.ledger.seal import seal_run
from laminar_py.ledger.start import first_events
from laminar_py.runtime.workers.incarnation import Incarnation

log = logging.getLogger(__name__)


async def record_start(incarnation: Incarnation, recovered: Recovered | None) -> None:
    """Put on record that an incarnation begins, and what it undoes of the one before."""
    checkpoint = incarnation.checkpoint
    begun = first_events(
        incarnation.config,
        incarnation=incarnation.number,
        host=socket.gethostname(),
        data=incarnation.inputs.digests,
        resumed_step=checkpoint.step if checkpoint else None,
    )
    incarnation.ledger.append_all([*begun, *(recovered.events if recovered else ())])
    await incarnation.ledger.commit()
    await incarnation.ledger.copy()


def seal(run: Path) -> None:
    """Seal the record of a run that nobody writes any more."""
    try:
        seal_run(run)
    except LedgerError as error:  # no reason to fail a run that is done
        log.warning("%s", error)
