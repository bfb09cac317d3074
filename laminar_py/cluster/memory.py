"""Deaths of parts for want of memory, of a host or of a GPU: told from others by what the part said last, or by
what the kernel of its node counts.

Asked by the keepers of parts. Invariant: a rise of a node's count explains one death there, the first that asks.
"""

import asyncio
from contextlib import suppress
from pathlib import Path

from ray.exceptions import RayError

from laminar_py.cluster.errors import PartDiedError, for_memory
from laminar_py.cluster.part import Part
from laminar_py.cluster.ray_cluster import on_node
from laminar_py.records.codec import decode, encode

COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))  # of this container, or else of the host
LOOK_S = 20.0  # a process starts on another node for it


def kernel_kills() -> bytes:
    """Processes that the kernel has ended for want of memory since this host started, 0 if nobody counts."""
    for path in COUNTERS:
        with suppress(OSError):
            for name, _, count in (line.partition(" ") for line in path.read_text().splitlines()):
                if name == "oom_kill":
                    return encode(int(count))
    return encode(0)


class KernelKills:
    """Counts of `kernel_kills` on the nodes of a run, as they were when last looked at."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # by Ray node

    async def meet(self, part: Part) -> None:
        """Take the count of the node of a part that has started, if that was never looked at."""
        node = part.place.node
        if node is not None and node not in self._seen:
            self._seen[node] = await part.ask(int, "kernel_kills")

    async def explain(self, death: PartDiedError, node: str | None) -> PartDiedError:
        """The death of a part on that node, with its cause where the kernel ended a process there for memory."""
        if node is None or node not in self._seen or for_memory(death.reason):
            return death
        try:
            async with asyncio.timeout(LOOK_S):
                count = decode(int, await on_node(node, kernel_kills))
        except (RayError, TimeoutError):  # it is gone or hangs, which explains the death
            return death
        rose, self._seen[node] = count > self._seen[node], count
        reason = f"out of memory: the kernel ended a process of its node ({death.reason})"
        return PartDiedError(death.part, reason) if rose else death
