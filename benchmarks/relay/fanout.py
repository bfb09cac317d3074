"""Time until the last of several replicas on one host has new weights: ours beside Ray, gloo and HTTP.

Rows `ray_over_ours`, `gloo_over_ours` and `http_over_ours`. A round begins with the call that gives the tensors
away and ends when the last replica has them as its engine would load them and has touched every page. Invariant:
sides are up together, take turns in changing order, and carry the same bytes from warm memory.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.relay.peers import Gloo, here, http_side, load, make_tensors
from laminar_lab.bench.processes import READY, Worker
from laminar_lab.bench.relay.hop import VERSION_BYTES
from laminar_lab.bench.relay.tree import WARM_VERSIONS, Tree, copy_s, raw
from laminar_lab.bench.report import Row
from laminar_lab.bench.turns import Ratio, Side, Tell, in_turn
from laminar_lab.bench.workplace import workplace
from laminar_py.relay.subscriber import Subscriber
from laminar_py.relay.wire.transport import RelayKeys

RAY = "ray.put, ray.get in actors, arrays not copied"


def rows(
    *, shm: Path, repeats: int, tell: Tell, num_bytes: int = VERSION_BYTES, num_replicas: int = 7
) -> list[Row]:
    """Time of others over ours, medians over `repeats` rounds; versions, and Ray's objects, lie in `shm`."""
    from benchmarks.relay.ray_store import ray_side  # here, since replicas import this module

    tensors, count = make_tensors(num_bytes), num_replicas + 1
    with workplace(shm) as folder, ExitStack() as stack:
        gloo = Gloo(count=count, num_bytes=num_bytes, rendezvous=f"file://{folder}/gloo", interface="lo")
        ray = stack.enter_context(ray_side(folder, tensors, num_replicas=num_replicas))
        broadcast = stack.enter_context(gloo.side(here))
        http = stack.enter_context(http_side(here, folder / "http", count=count, num_bytes=num_bytes))
        ours = stack.enter_context(our_side(folder / "ours", tensors, num_replicas=num_replicas))
        sides = {"ray": ray, "gloo": broadcast.measure, "http": http.measure, "ours": ours}
        seconds = in_turn(sides, rounds=repeats, warm=WARM_VERSIONS, tell=tell)
        broadcast.check()
        http.check()
    pairs = [(raw(tensor), raw(tensor).copy()) for tensor in tensors.values()]
    copying_s = median(copy_s(pairs) for _ in range(repeats))
    told = f"{num_bytes / 2**20:g} MiB to {num_replicas} replicas"
    others = {"ray": RAY, "gloo": broadcast.conditions, "http": http.conditions}
    return [_row(name, others[name], seconds, copying_s, told) for name in others]


def _row(name: str, how: str, seconds: dict[str, list[float]], copying_s: float, told: str) -> Row:
    ratio = Ratio.of(seconds[name], seconds["ours"])
    conditions = (
        f"{told} on one host, until the last has touched every page of tensors that its engine can load; {name}:"
        f" {how}, {median(seconds[name]):.3f} s; ours: encrypted, verified safetensors mapped,"
        f" {median(seconds['ours']):.3f} s; one copy of the bytes {copying_s:.3f} s; {ratio}"
    )
    return Row(f"{name}_over_ours", ratio.median, "x", conditions)


@contextmanager
def our_side(folder: Path, tensors: dict[str, Tensor], *, num_replicas: int) -> Iterator[Side]:
    """A publisher here, a root, and subscribers, which share the root's folder."""
    keys = RelayKeys.generate()
    with ExitStack() as stack:
        tree = stack.enter_context(Tree(folder, keys=keys, leaf=False))
        follow = partial(_subscribe, endpoint=tree.root.endpoint, keys=keys)
        replicas = [stack.enter_context(Worker(partial(follow, number=n))) for n in range(num_replicas)]
        for replica in replicas:
            replica.await_ready()

        def measure(_: int) -> float:
            tree.await_spare()
            began = time.monotonic()
            tree.publish(tensors.items())
            ended = max(replica.hear(float) for replica in replicas)
            tree.await_last()
            return ended - began

        yield measure


def _subscribe(pipe: Connection, *, number: int, endpoint: str, keys: RelayKeys) -> None:
    """Pull and load each version; says when its tensors were loaded."""

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
