"""Environment variables of a run's processes, set when the room is imported: before any module can import Ray.

Ray reads its variables when it is imported. The variables say: token authentication, no usage reports (trackers
send none either), no visible GPU for a part that has none, no second OpenMP thread in any worker, an allocator
that keeps its pages (a learner step allocates and frees tensors of megabytes all the time, which otherwise takes 6
to 14 % of the step), a bound on the output of each worker, and a folder for Ray's sockets if the path of TMPDIR is
too long for them.
"""

import os

os.environ.setdefault("RAY_AUTH_MODE", "token")
if len(os.environ.get("TMPDIR", "")) > 36:  # as `records.host.MAX_FOLDER`
    os.environ.setdefault("RAY_TMPDIR", "/tmp")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "GLIBC_TUNABLES",
    "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=2000000000:glibc.malloc.mmap_threshold=2000000000",
)
WORKERS_READ = {
    name: os.environ[name] for name in ("OMP_NUM_THREADS", "GLIBC_TUNABLES", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
} | {"RAY_ROTATION_MAX_BYTES": str(1 << 24), "RAY_ROTATION_BACKUP_COUNT": "1"}
