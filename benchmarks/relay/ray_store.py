"""Ray's object store as a way to bring new weights to all replicas of one host.

Used by `fanout`. The object is put once, and each actor maps it where it lies. Invariant: the local cluster and
its actors end with the side.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import laminar_py.runtime.cluster  # noqa: F401 (sets what Ray reads when it is imported: authentication)

# isort: split
import ray
from torch import Tensor

from benchmarks.relay.peers import touch
from laminar_lab.bench.processes import PATIENCE_S
from laminar_lab.bench.relay.tree import Bytes, raw
from laminar_lab.bench.turns import Side

STORE_VERSIONS = 4  # one being written and one that the actors hold, and room between them
SMALLEST_STORE_BYTES = 128 * 2**20  # below, Ray refuses


class ArrayHolder:
    """An actor that holds the newest arrays."""

    def __init__(self) -> None:
        self._held: list[Bytes] = []

    def load(self, references: "list[ray.ObjectRef[list[Bytes]]]") -> float:
        """Get and touch what a reference stands for; it is wrapped, so that Ray does not get it before."""
        [self._held] = ray.get(references)
        for array in self._held:
            touch(array)
        return time.monotonic()


@contextmanager
def ray_side(folder: Path, tensors: dict[str, Tensor], *, num_replicas: int) -> Iterator[Side]:
    """`ray.put` here and `ray.get` in actors, arrays without a copy; the store lies in `folder`."""
    arrays = [raw(tensor) for tensor in tensors.values()]
    num_bytes = sum(array.nbytes for array in arrays)
    ray.init(
        address="local",
        num_cpus=num_replicas,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=max(STORE_VERSIONS * num_bytes, SMALLEST_STORE_BYTES),
        _node_ip_address="127.0.0.1",
        _plasma_directory=str(folder),
    )
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    replicas = [ray.remote(ArrayHolder).options(num_cpus=1).remote() for _ in range(num_replicas)]

    def measure(_: int) -> float:
        began = time.monotonic()
        reference = ray.put(arrays)
        ended: list[float] = ray.get(
            [replica.load.remote([reference]) for replica in replicas], timeout=PATIENCE_S
        )
        return max(ended) - began

    try:
        yield measure
    finally:
        ray.shutdown()
        shutil.rmtree(session, ignore_errors=True)
