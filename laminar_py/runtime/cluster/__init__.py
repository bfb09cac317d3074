"""Processes: the only room that knows Ray.

Ray reads these variables when it is imported, so they are set here, before any module of the room can import it:
token authentication with a token of this run's own, no usage reports (from trackers neither), parts that rank with
the controller (replicas lower themselves; on a cluster that the run joins, Ray's own niceness holds), no GPU in
sight of a part that has none, no second OpenMP thread in any worker, and an allocator that keeps its pages (a
learner step hands tensors of megabytes back and forth: 6 to 14 % of its time).
"""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

_RUN_TOKEN = secrets.token_hex(32)  # of a cluster that this run starts
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", _RUN_TOKEN)
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "GLIBC_TUNABLES",
    "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=2000000000:glibc.malloc.mmap_threshold=2000000000",
)
WORKERS_READ = {
    name: os.environ[name] for name in ("OMP_NUM_THREADS", "GLIBC_TUNABLES", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
}


def use_token_of_cluster() -> None:
    """Before a cluster is joined: its token is in the environment, or in a file that Ray reads if ours is away."""
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_TOKEN") == _RUN_TOKEN and file.is_file():
        del os.environ["RAY_AUTH_TOKEN"]


if TYPE_CHECKING:
    from laminar_py.runtime.cluster.backend import LOOPBACK as LOOPBACK
    from laminar_py.runtime.cluster.backend import Process as Process
    from laminar_py.runtime.cluster.backend import cluster as cluster
    from laminar_py.runtime.cluster.backend import open_cluster as open_cluster
    from laminar_py.runtime.cluster.errors import RunFailedError as RunFailedError
    from laminar_py.runtime.cluster.part import Part as Part
    from laminar_py.runtime.cluster.placement import Place as Place
else:
    __getattr__ = public_names(__name__)
