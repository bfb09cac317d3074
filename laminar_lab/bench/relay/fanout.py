"""Time until the last of several replicas on one host has new weights: ours beside Ray and gloo.

A round begins with the call that hands over the tensors. It ends when the last replica has loaded them as its
engine would, and has touched every page. Ray's object is put once, and each actor maps it in place. All sides are
up together, take turns in changing order, and carry the same bytes from warm memory.
"""

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from laminar_lab.bench.processes import PATIENCE_S, READY, Worker, here
from laminar_lab.bench.relay.gloo import GLOO, Gloo, make_tensors, touch
from laminar_lab.bench.relay.hop import VERSION_BYTES
from laminar_lab.bench.relay.tree import ROOT, WARM_VERSIONS, Bytes, Tree, copy_s, raw
from laminar_lab.bench.report import Ratio, Row, Side, in_turn
from laminar_lab.bench.workplace import SHARED_MEMORY, workplace
from laminar_py.relay import RelayKeys, Subscriber

ROWS = "ray_over_ours gloo_over_ours"
RAY = "ray.put, ray.get in actors, arrays not copied"


def rows(
    *, shm: Path = SHARED_MEMORY, repeats: int = 7, num_bytes: int = VERSION_BYTES, num_replicas: int = 7
) -> list[Row]:
    """Compare the times, medians over `repeats` rounds; versions, and Ray's objects, lie in `shm`."""
    tensors = make_tensors(num_bytes)
    with workplace(shm) as folder, ExitStack() as stack:
        gloo = Gloo(
            count=num_replicas + 1, num_bytes=num_bytes, rendezvous=f"file://{folder}/gloo", interface="lo"
        )
        sides = {
            "ray": stack.enter_context(ray_side(folder, tensors, num_replicas=num_replicas)),
            "gloo": stack.enter_context(gloo.side(here)),
            "ours": stack.enter_context(our_side(folder / "ours", tensors, num_replicas=num_replicas)),
        }
        seconds = in_turn(sides, rounds=repeats, warm=WARM_VERSIONS)
    pairs = [(raw(tensor), raw(tensor).copy()) for tensor in tensors.values()]
    copying_s = median(copy_s(pairs) for _ in range(repeats))
    found = []
    for name, how in {"ray": RAY, "gloo": GLOO}.items():
        conditions = (
            f"{num_bytes / 2**20:g} MiB to {num_replicas} replicas on one host, until the last has touched every"
            f" page of tensors that its engine can load; {name}: {how}, {median(seconds[name]):.3f} s; ours:"
            f" encrypted, verified safetensors mapped, {median(seconds['ours']):.3f} s; one copy of the bytes"
            f" {copying_s:.3f} s"
        )
        found.append(Ratio.between(seconds[name], seconds["ours"]).row(f"{name}_over_ours", conditions))
    return found


@contextmanager
def our_side(folder: Path, tensors: dict[str, Tensor], *, num_replicas: int) -> Iterator[Side]:
    """Yield our side: a publisher in this process, a root, and subscribers, which share the root's folder."""
    keys = RelayKeys.generate()
    with ExitStack() as stack:
        tree = stack.enter_context(Tree(folder, keys=keys, topology=ROOT))
        follow = partial(_subscribe, endpoint=tree.root.endpoint, keys=keys)
        replicas = [stack.enter_context(Worker(partial(follow, number=n))) for n in range(num_replicas)]
        for replica in replicas:
            replica.await_ready()

        def measure(_: int) -> float:
            tree.await_spare()
            began = time.monotonic()
            tree.publish(tensors.items())
            ended = max(replica.receive(float) for replica in replicas)
            tree.await_last()
            return ended - began

        yield measure


def _subscribe(pipe: Connection, *, number: int, endpoint: str, keys: RelayKeys) -> None:
    """Pull and load each version; send the moment at which its tensors were loaded."""

    async def follow() -> None:
        subscriber = Subscriber(endpoint, f"replica-{number}", keys)
        version = -1
        async with asyncio.TaskGroup() as group:
            group.create_task(subscriber.run())
            pipe.send(READY)
            while True:
                await subscriber.wait_newer(version)
                pulled = await subscriber.pull()
                held = load(Path(pulled.path))
                pipe.send(time.monotonic())
                version = pulled.version
                del held  # an engine has its own copy by then

    torch.set_num_threads(1)
    asyncio.run(follow())


def load(folder: Path) -> list[Tensor]:
    """Map the tensors of the safetensors files in `folder` and touch each page."""
    tensors = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors += [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (not a dict)
    for tensor in tensors:
        touch(raw(tensor))
    assert tensors, f"{folder} has no tensors"
    return tensors


STORE_VERSIONS = 4  # one in writing, one in the hands of the actors, and room between them
SMALLEST_STORE_BYTES = 128 * 2**20  # below, Ray refuses


class ArrayHolder:
    """An actor that holds the newest arrays."""

    def __init__(self) -> None:
        self._held: list[Bytes] = []

    def load(self, references: list[Any]) -> float:
        """Get and touch the arrays of a reference. The list keeps Ray from getting them before the call."""
        import ray  # here, since workers that subscribe import this module

        [self._held] = ray.get(references)
        for array in self._held:
            touch(array)
        return time.monotonic()


@contextmanager
def ray_side(folder: Path, tensors: dict[str, Tensor], *, num_replicas: int) -> Iterator[Side]:
    """Yield Ray's side: `ray.put` here and `ray.get` in actors, without copies; the store lies in `folder`."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray  # after `processes`, which sets the variables that Ray reads at its import

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
