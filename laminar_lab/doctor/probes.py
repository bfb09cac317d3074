"""Measurements of one node for `laminar doctor --try`: compilers, copies between memories, collectives of ranks.

`laminar_py.runtime.cluster.on_node` calls `probe_node` and `run_ranks` on each node, so they return encoded
records.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec

from laminar_py.children import kernel
from laminar_py.records.codec import decode, encode

COPY_BYTES = 1 << 28
REPEATS = 3
COLLECTIVE_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}
JOIN_S = 60.0  # from the start of the ranks until all have measured
LOG_CHARS = 200

_children: set["subprocess.Popen[bytes]"] = set()  # of calls that run in this process


class NodeProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Software and speed of a node, e.g. `NodeProbe(torch="2.13.0", compiler="g++", shm_free=8 << 30, ...)`."""

    torch: str
    driver: str = ""  # "" without a GPU
    gpus: tuple[str, ...] = ()
    compiler: str = ""  # a C++ compiler on PATH; "" if there is none
    headers: bool = False  # of this Python
    shm_free: int = 0  # bytes
    shm_bytes_per_s: float = 0.0  # of writing there
    to_gpu: float | None = None  # bytes per second from page-locked memory, of the slowest GPU
    from_gpu: float | None = None


class Collectives(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives over ranks, of one rank, e.g. `Collectives(rank=0, all_reduce=2e9, reduce_scatter=3e9)`.

    Rates are bytes that a rank sends and receives per second, as rings do.
    """

    rank: int
    all_reduce: float
    reduce_scatter: float


def probe_node(shm: str, has_gpus: str) -> bytes:
    """Measure this node, and return an encoded `NodeProbe`.

    `shm` is the folder of `relay.shm`; `has_gpus` is empty for a node without parts on GPUs.
    """
    folder = Path(shm)
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    gpus = _probe_gpus() if has_gpus else []
    return encode(
        NodeProbe(
            torch=version("torch"),
            driver=_driver(),
            gpus=tuple(name for name, _, _ in gpus),
            compiler=next((name for name in ("g++", "clang++") if shutil.which(name)), ""),
            headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
            shm_free=free,
            shm_bytes_per_s=_write_rate(folder) if free > 2 * COPY_BYTES else 0.0,
            to_gpu=min((there for _, there, _ in gpus), default=None),
            from_gpu=min((back for _, _, back in gpus), default=None),
        )
    )


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return ""
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.partition("\n")[0].strip()


def _write_rate(folder: Path) -> float:
    """Return the bytes per second of writing a file in shared memory, the best of some."""
    data, rates = bytes(COPY_BYTES), []
    for _ in range(REPEATS):
        with tempfile.TemporaryFile(dir=folder) as file:
            begin = time.perf_counter()
            file.write(data)
            rates.append(COPY_BYTES / (time.perf_counter() - begin))
    return max(rates)


def _visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA counts them; [] means all. Ray hides all from a probe."""
    return [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]


def _probe_gpus() -> list[tuple[str, float, float]]:
    """Return name and bytes per second to and from each GPU, by a process that sees them; [] where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if _visible_gpus():
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_visible_gpus())
    command = [*_own_command(), "gpus"]
    with _child(command, environment) as process:
        output, _ = process.communicate()
    lines = output.decode(errors="replace").strip().splitlines()
    return decode(list[tuple[str, float, float]], bytes.fromhex(lines[-1])) if process.returncode == 0 else []


def _own_command() -> list[str]:
    """Return the command that starts this module in a process, which ends with the present one."""
    return [sys.executable, "-m", "laminar_lab.doctor.probes", str(os.getpid())]


@contextmanager
def _child(command: Sequence[str], environment: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process whose output is read, and which has ended when the context ends."""
    out = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    _children.add(process)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        _children.discard(process)


def end_children() -> None:
    """End all processes of probes that run in this process, so that their calls return, on whatever thread."""
    for process in list(_children):
        process.kill()


def _copies_of_all() -> list[tuple[str, float, float]]:
    import torch

    return [(torch.cuda.get_device_name(index), *_gpu_copies(index)) for index in range(torch.cuda.device_count())]


def _gpu_copies(index: int) -> tuple[float, float]:
    """Return the bytes per second to and from a GPU, the best of some copies."""
    import torch

    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
    found = []
    for to, of in ((there, host), (host, there)):
        rates = []
        for _ in range(REPEATS):
            torch.cuda.synchronize(index)
            begin = time.perf_counter()
            to.copy_(of)
            torch.cuda.synchronize(index)
            rates.append(COPY_BYTES / (time.perf_counter() - begin))
        found.append(max(rates))
    return found[0], found[1]


# ---- collectives


def run_ranks(rendezvous: str, ranks: str, world_size: str, device: str) -> bytes:
    """Run these ranks (numbers with commas) of a group here, and return their encoded answers [ranks].

    An answer is what `measured` reads, or the last line of a rank that did not end well. Each rank uses the GPU
    with its place among these ranks.
    """
    numbers = [int(rank) for rank in ranks.split(",")]
    command = [*_own_command(), rendezvous, world_size, device]
    with ExitStack() as stack:
        running = []
        for index, rank in enumerate(numbers):
            gpus = _visible_gpus()
            gpu = gpus[index] if index < len(gpus) else str(index)
            ours = {"CUDA_VISIBLE_DEVICES": gpu} if device == "cuda" else {"OMP_NUM_THREADS": "1"}
            running.append(stack.enter_context(_child([*command, str(rank)], os.environ | ours)))
        end = time.monotonic() + JOIN_S
        return encode([_answer(process, rank, end) for process, rank in zip(running, numbers, strict=True)])


def _answer(process: "subprocess.Popen[bytes]", rank: int, end: float) -> str:
    """Return a rank's answer; end a late rank."""
    try:
        output, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        lines = output.decode(errors="replace").strip().splitlines()
        said = lines[-1][:LOG_CHARS] if lines else "nothing"
        return f"rank {rank}: no end within {JOIN_S:g} s; it said last: {said}"
    lines = output.decode(errors="replace").strip().splitlines()
    if process.returncode or not lines:
        return f"rank {rank}: {lines[-1][:LOG_CHARS] if lines else 'ended without a word'}"
    return lines[-1]


def measured(answer: str) -> Collectives | None:
    """Return the figures of a rank's answer; None for a rank that has none."""
    try:
        return decode(Collectives, bytes.fromhex(answer))
    except (ValueError, msgspec.DecodeError):
        return None


def _measure_rank(rendezvous: str, world_size: int, device: str, rank: int) -> Collectives:
    """Join the group of all ranks, and measure its collectives."""
    import torch
    import torch.distributed as dist

    from laminar_py.learner import join_group

    torch.set_num_threads(1)
    sys.stdout.write(f"waits for the other ranks of {world_size}\n")
    sys.stdout.flush()
    mesh = join_group(rendezvous, rank=rank, world_size=world_size, device_type=device)
    count = COLLECTIVE_BYTES[device] // 4 // world_size * world_size
    data = torch.zeros(count, dtype=torch.float32, device=mesh.device_type)
    part = torch.zeros(count // world_size, dtype=torch.float32, device=mesh.device_type)
    share = (world_size - 1) / world_size * count * 4  # bytes that a rank sends in a half of a ring

    def rate(call: Callable[[], object], moved: float) -> float:
        seconds = []
        for _ in range(REPEATS):
            dist.barrier()
            begin = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return moved / min(seconds)

    group = mesh.get_group()
    return Collectives(
        rank=rank,
        all_reduce=rate(lambda: dist.all_reduce(data, group=group), 2 * share),
        reduce_scatter=rate(lambda: dist.reduce_scatter_tensor(part, data, group=group), share),
    )


if __name__ == "__main__":
    _parent, *_arguments = sys.argv[1:]
    kernel.end_with_parent(parent=int(_parent))  # which may have been killed during the imports
    if _arguments == ["gpus"]:
        _found: object = _copies_of_all()
    else:
        _rendezvous, _world_size, _device, _rank = _arguments
        _found = _measure_rank(_rendezvous, int(_world_size), _device, int(_rank))
    sys.stdout.write(encode(_found).hex() + "\n")
