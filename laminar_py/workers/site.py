"""What the owners of a run's processes share."""

from dataclasses import dataclass

from laminar_py.cluster.placement import Placement
from laminar_py.config.run import RunConfig
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.workers.supervisor import Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A run's config and folder, where its parts go, and who counts their deaths."""

    config: RunConfig
    run: RunFolder
    placement: Placement
    supervisor: Supervisor
