"""First acts of the processes of a run. Called by their actors.

An actor is a thin shell around a part: it decodes a request, wires the part and passes bytes through. All that
crosses is the bytes of a typed record or a scalar. A part that failed raises its own error at the next call, and
its keeper decides what then. Heavy libraries are imported by `start`, since the controller imports the actors.
"""

import logging
import os
import threading
from pathlib import Path

from laminar_py.config.loading import read_config
from laminar_py.config.run import RunConfig
from laminar_py.ledger.database import segments_path
from laminar_py.ledger.segments.fetch import StoreClient
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.wire import ADDRESSES
from laminar_py.ledger.segments.writer import SegmentWriter
from laminar_py.runtime.cluster.memory import kernel_kills
from laminar_py.runtime.workers.specs import PartStart, PayloadStart
from laminar_py.sandbox.inside import kernel


class PartActor:
    """Base of all shells. The kernel kills the process when its parent dies: a Ray node, or the fork server.

    A process that computes, hangs or is stopped would notice late or never.
    """

    def __init__(self) -> None:
        threading.Thread(target=_end_with_parent, name="end-with-node", daemon=True).start()

    def pid(self) -> int:
        """Id of the process."""
        return os.getpid()

    def kernel_kills(self) -> bytes:
        """Answer of `cluster.memory.kernel_kills` here."""
        return kernel_kills()


def _end_with_parent() -> None:
    """Ask for the death signal on a thread that lives as long as the process, as the request ends with it."""
    kernel.end_with_parent()
    threading.Event().wait()


def open_part(spec: PartStart, name: str) -> RunConfig:
    """Config of the run whose part this process is; logs go into the run's folder from here on."""
    log_to(spec.run_dir, name)
    return read_config(spec.config)


def open_reader(spec: PayloadStart) -> PayloadReader:
    """Reader of payload, from this host's segments and from stores of others."""
    client = StoreClient(bytes.fromhex(spec.store_key), Path(spec.run_dir) / ADDRESSES)
    return PayloadReader(open_folder(spec), fetch=client)


def open_writer(spec: PayloadStart) -> SegmentWriter:
    """Writer of payload on this host."""
    return SegmentWriter(open_folder(spec), spec.label)


def open_folder(spec: PayloadStart) -> Path:
    """Folder of this host's segments."""
    return segments_path(Path(spec.run_dir))


def log_to(run_dir: str, part: str) -> None:
    """Have the process log into `<run>/logs/<part>.log`."""
    logging.basicConfig(
        filename=Path(run_dir) / "logs" / f"{part}.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        force=True,
    )


def compute_on(num_threads: int) -> None:
    """Have this process, whose environment says one, compute on so many threads."""
    import torch

    torch.set_num_threads(num_threads)


def learner_threads(config: RunConfig, *, num_cores: int, ranks_here: int) -> int:
    """Threads of a learner's rank: its share of a node's cores, where weights are updated on them.

    One where parts share the cores, as with engines on CPUs, and where a GPU does all the work.
    """
    if not config.learner.offload or config.rollout.engine.yields_cpus:
        return 1
    return max(1, num_cores // ranks_here)
