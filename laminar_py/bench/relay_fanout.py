"""Time until the last of several replicas on one host has new weights: ours beside Ray, gloo and HTTP.

Rows `ray_over_ours`, `gloo_over_ours` and `http_over_ours` of `laminar bench relay`. Invariant: all sides are up
together, take turns in changing order, and carry the same bytes from warm memory.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from torch import Tensor

from laminar_py.bench.processes import Measure
from laminar_py.bench.relay_sides import gloo_side, http_side, make_tensors, our_side, raw
from laminar_py.bench.relay_tree import WARM_VERSIONS
from laminar_py.bench.report import Row

OTHERS = {
    "ray": "ray.put, ray.get in actors, arrays not copied",
    "gloo": "broadcast from and into memory that is not shared",
    "http": "http.server with sendfile, http.client, connections left open, into mapped shared memory",
}


def rows(
    folder: Path, *, num_bytes: int, num_replicas: int, repeats: int, tell: Callable[[str], None]
) -> list[Row]:
    """Their time over ours, medians over `repeats` rounds; `folder` is in shared memory."""
    from laminar_py.bench.relay_ray import ray_side

    tensors = make_tensors(num_bytes)
    with ExitStack() as stack:
        sides = {"ray": stack.enter_context(ray_side(folder, tensors, num_replicas=num_replicas))}
        for name, side in {"gloo": gloo_side, "http": http_side}.items():
            sides[name] = stack.enter_context(side(folder / name, num_bytes, num_replicas=num_replicas))
        sides["ours"] = stack.enter_context(our_side(folder / "ours", tensors, num_replicas=num_replicas))
        seconds = _in_turn(sides, repeats, tell)
    copying = _memcpy_s(tensors, repeats)
    return [
        _row(name, seconds, copying, f"{num_bytes / 2**20:g} MiB to {num_replicas} replicas") for name in OTHERS
    ]


def _in_turn(sides: dict[str, Measure], repeats: int, tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Seconds of each side by round, another side first in each."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(WARM_VERSIONS + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(sides[name]())
        if turn >= WARM_VERSIONS:
            tell(", ".join(f"{name} {seconds[name][-1]:.3f} s" for name in names))
    return {name: found[WARM_VERSIONS:] for name, found in seconds.items()}


def _memcpy_s(tensors: dict[str, Tensor], repeats: int) -> float:
    """Seconds of a plain copy into warm memory."""
    pairs = [(raw(tensor), raw(tensor).copy()) for tensor in tensors.values()]
    elapsed = []
    for _ in range(repeats):
        began = time.perf_counter()
        for source, target in pairs:
            np.copyto(target, source)
        elapsed.append(time.perf_counter() - began)
    return median(elapsed)


def _row(name: str, seconds: dict[str, list[float]], copying: float, load: str) -> Row:
    ratios = [their / our for their, our in zip(seconds[name], seconds["ours"], strict=True)]
    conditions = (
        f"{load} on one host, until the last has touched every page of tensors that its engine can load; {name}:"
        f" {OTHERS[name]}, {median(seconds[name]):.3f} s; ours: encrypted, verified safetensors mapped,"
        f" {median(seconds['ours']):.3f} s; one copy of the bytes {copying:.3f} s; median of {len(ratios)}"
        f" rounds in turn, {min(ratios):.2f} to {max(ratios):.2f}"
    )
    return Row(f"{name}_over_ours", median(ratios), "x", conditions)
