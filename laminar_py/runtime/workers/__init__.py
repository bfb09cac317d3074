"""Processes of a run, and how each is started."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.runtime.link.turns import RemoteEnvironments as RemoteEnvironments
    from laminar_py.runtime.workers.incarnation import RunStart as RunStart
    from laminar_py.runtime.workers.processes.base import PartActor as PartActor
    from laminar_py.runtime.workers.processes.base import open_reader as open_reader
    from laminar_py.runtime.workers.processes.base import read_run_config as read_run_config
    from laminar_py.runtime.workers.processes.base import segments_folder as segments_folder
    from laminar_py.runtime.workers.processes.environment import EnvironmentActor as EnvironmentActor
    from laminar_py.runtime.workers.shared import SharedReplicas as SharedReplicas
    from laminar_py.runtime.workers.specs import EnvironmentSpec as EnvironmentSpec
    from laminar_py.runtime.workers.specs import ReplicaSpec as ReplicaSpec
    from laminar_py.runtime.workers.specs import ScorerSpec as ScorerSpec
else:
    __getattr__ = public_names(__name__)
