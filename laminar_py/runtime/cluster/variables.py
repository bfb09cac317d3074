"""Environment variables of a run's processes, set when the room is imported: before any module can import Ray.

Ray reads its variables when it is imported. The variables say: token authentication with a token of this run's
own, no usage reports (trackers send none either), the niceness of the controller for all parts (replicas lower
themselves; a cluster that the run joins keeps its own), no visible GPU for a part that has none, no second OpenMP
thread in any worker, and an allocator that keeps its pages (a learner step allocates and frees tensors of
megabytes all the time, which otherwise takes 6 to 14 % of the step).
"""

import os
import secrets
from pathlib import Path

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
    """Prepare for joining a cluster: remove this run's own token if a file has the token of the cluster.

    Ray reads the file only if the environment has no token.
    """
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_TOKEN") == _RUN_TOKEN and file.is_file():
        del os.environ["RAY_AUTH_TOKEN"]
