"""Base of the actors beside this module, and steps of their start: config, log, readers and writers.

An actor is the object that a process hosts. Its methods take and return typed records or scalars, which
`cluster.calls.Shell` decodes and encodes by their annotations. A part that failed raises its own error at the next
call, and its keeper decides what follows. The controller names an actor as "module:Class" and imports no module of
it, so these modules import all libraries that their process needs.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from laminar_py.children import kernel
from laminar_py.children.hosted import log_to
from laminar_py.config.loading import read_config
from laminar_py.config.run import RunConfig
from laminar_py.ledger.database import segments_path
from laminar_py.ledger.segments.reader import PATIENCE_S, PayloadReader
from laminar_py.ledger.segments.writer import SegmentWriter
from laminar_py.runtime.workers.specs import PartStart, WriterStart


class PartActor:
    """Base of all actors. The kernel kills the process when its parent, Ray's node or the fork server, ends."""

    def __init__(self) -> None:
        threading.Thread(target=_end_with_parent, name="end-with-node", daemon=True).start()

    def pid(self) -> int:
        """Return the id of the process."""
        return os.getpid()


def _end_with_parent() -> None:
    """Request the kernel's signal, and never return: the request ends with the thread that made it."""
    kernel.end_with_parent()
    threading.Event().wait()


class ComputingActor(PartActor):
    """Base of actors whose calls arrive on several threads, and compute on one thread (`on_compute_thread`).

    The allocator keeps memory for each thread, so six computing threads would hold six times the memory of a step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="compute")


Actor = TypeVar("Actor", bound=ComputingActor)
P = ParamSpec("P")
T = TypeVar("T")


def on_compute_thread(method: Callable[Concatenate[Actor, P], T]) -> Callable[Concatenate[Actor, P], T]:
    """Wrap a method so that its calls run on the actor's compute thread, one after the other."""

    @wraps(method)
    def run(self: Actor, *arguments: P.args, **named: P.kwargs) -> T:
        return self.compute.submit(method, self, *arguments, **named).result()

    return run  # type: ignore[return-value] # `wraps` types it more narrowly


def read_run_config(spec: PartStart, name: str) -> RunConfig:
    """Return the run's config from `spec`; from now on the process logs into `<run>/logs/<name>.log`."""
    log_to(log_of(spec.run_dir, name), force=True)
    return read_config(spec.config)


def open_reader(spec: PartStart, config: RunConfig) -> PayloadReader:
    """Open a reader of the run's segments."""
    return PayloadReader(segments_folder(spec), patience_s=PATIENCE_S if has_several_hosts(config) else 0.0)


def open_writer(spec: WriterStart, config: RunConfig) -> SegmentWriter:
    """Open the writer of the segment with the part's label."""
    return SegmentWriter(segments_folder(spec), spec.label, shared=has_several_hosts(config))


def segments_folder(spec: PartStart) -> Path:
    """Return the folder of the run's segments."""
    return segments_path(Path(spec.run_dir))


def has_several_hosts(config: RunConfig) -> bool:
    """Return whether parts of the run may be on other hosts, which see the segments over a network."""
    return config.cluster.address is not None


def log_of(run_dir: str, part: str) -> Path:
    """Return the log of a part, `<run>/logs/<part>.log`."""
    return Path(run_dir) / "logs" / f"{part}.log"


def compute_on(num_threads: int) -> None:
    """Have torch compute on `num_threads` in this process, whatever OMP_NUM_THREADS says."""
    import torch

    torch.set_num_threads(num_threads)


def learner_threads(config: RunConfig, *, num_cores: int, ranks_here: int) -> int:
    """Return on how many threads a rank of the learner computes.

    A rank that updates offloaded weights on the CPU has its share of the node's `num_cores`. Any other rank has
    one thread: its engines share the cores with it, or its GPU does all the work.
    """
    if not config.learner.offload or config.rollout.engine.yields_cpus:
        return 1
    return max(1, num_cores // ranks_here)
