"""The first events that a controller records, and whether a record is of a simulation.

The controller appends them, and a simulation that keeps a record. The audit, summaries and resumes ask
`is_simulated`.
"""

import os
import sqlite3
from hashlib import blake2b

from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.ledger.database import SCHEMA_VERSION
from laminar_py.ledger.rows import decode_event
from laminar_py.records.events import AnyEvent, RunStarted, Scaled


def first_events(
    config: RunConfig,
    *,
    incarnation: int,
    host: str,
    data: dict[str, str],
    resumed_step: int | None = None,
    simulated: bool = False,
) -> list[AnyEvent]:
    """Return the events of a controller's start and of its fleet; `data` has a digest for each data source."""
    started = RunStarted(
        incarnation=incarnation,
        host=host,
        pid=os.getpid(),
        schema=SCHEMA_VERSION,
        config_digest=blake2b(config.model_dump_json().encode(), digest_size=16).hexdigest(),
        drain=config.rollout.on_new_weights is OnNewWeights.DRAIN,
        max_staleness=config.staleness.enforced,
        resumed_step=resumed_step,
        data=data,
        eval_requests=config.eval.requests(config.rollout.sampling.params()),
        simulated=simulated,
    )
    return [started, Scaled(tuple(range(config.rollout.replicas)), config.rollout.engine.servers)]


def is_simulated(connection: sqlite3.Connection) -> bool:
    """Whether a record is of a simulation, which generates no tokens."""
    kind = RunStarted.__struct_config__.tag
    first = connection.execute("SELECT body FROM event WHERE kind = ? LIMIT 1", (kind,)).fetchone()
    event = None if first is None else decode_event(first[0])
    return isinstance(event, RunStarted) and event.simulated
