"""Starts and calls the processes of a run, on this host or on a Ray cluster. The only room that knows Ray."""

from typing import TYPE_CHECKING

import laminar_py.runtime.cluster.variables  # noqa: F401 (sets the variables before Ray is imported)
from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.runtime.cluster.backend import LOOPBACK as LOOPBACK
    from laminar_py.runtime.cluster.backend import Cluster as Cluster
    from laminar_py.runtime.cluster.backend import Process as Process
    from laminar_py.runtime.cluster.backend import cluster as cluster
    from laminar_py.runtime.cluster.backend import free_port as free_port
    from laminar_py.runtime.cluster.backend import nodes as nodes
    from laminar_py.runtime.cluster.backend import on_node as on_node
    from laminar_py.runtime.cluster.backend import open_cluster as open_cluster
    from laminar_py.runtime.cluster.backend import use_cluster as use_cluster
    from laminar_py.runtime.cluster.errors import NoAnswerError as NoAnswerError
    from laminar_py.runtime.cluster.errors import RunFailedError as RunFailedError
    from laminar_py.runtime.cluster.part import Part as Part
    from laminar_py.runtime.cluster.placement import Needs as Needs
    from laminar_py.runtime.cluster.placement import Node as Node
    from laminar_py.runtime.cluster.placement import NodeSlot as NodeSlot
    from laminar_py.runtime.cluster.placement import Placement as Placement
    from laminar_py.runtime.cluster.placement import Plan as Plan
else:
    __getattr__ = public_names(__name__)
