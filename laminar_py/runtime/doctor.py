"""What this machine can run: one finding per part, with a remedy where something is missing."""

import importlib.metadata
import importlib.util
import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

FILES_WANTED = 4096
SHM_WANTED = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `laminar doctor`."""

    subject: str
    state: str
    good: bool
    remedy: str = ""


def examine() -> list[Finding]:
    """All findings, the plain ones first."""
    return [_machine(), _shared_memory(), _files(), _torch(), _gpu(), *_optional()]


def _machine() -> Finding:
    cores, memory = os.cpu_count() or 1, psutil.virtual_memory().total
    good = cores >= 2 and memory >= 6 << 30
    remedy = "" if good else "the quickstart wants two cores and 6 GiB"
    return Finding("machine", f"{cores} cores, {memory / 2**30:.0f} GiB", good, remedy)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", "no /dev/shm", False, "mount a tmpfs and name it in relay.shm")
    free = shutil.disk_usage(path).free
    remedy = "" if free >= SHM_WANTED else "enlarge it (docker run --shm-size=8g), or name another in relay.shm"
    return Finding("shared memory", f"{free / 2**30:.1f} GiB free in {path}", free >= SHM_WANTED, remedy)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "" if soft >= FILES_WANTED else f"ulimit -n {min(hard, 65536)}"
    return Finding("open files", f"{soft} allowed", soft >= FILES_WANTED, remedy)


def _torch() -> Finding:
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return Finding("torch", f"{torch.__version__} (OMP_NUM_THREADS {threads}; every part uses one thread)", True)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "none", True, "not needed for the quickstart; the embedded engine runs on CPU")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Finding("GPU", f"{names}; CUDA {torch.version.cuda}", True)


def _optional() -> list[Finding]:
    wanted = {
        "flash_attn": "pip install flash-attn --no-build-isolation (CUDA only)",
        "sglang": "pip install sglang in an environment of its own (rollout on clusters)",
    }
    findings = []
    for module, remedy in wanted.items():
        present = importlib.util.find_spec(module) is not None
        state = importlib.metadata.version(module.replace("_", "-")) if present else "not installed"
        findings.append(Finding(module, state, present, "" if present else remedy))
    return findings
