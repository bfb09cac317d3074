"""Deaths of parts for want of memory, of a host or of a GPU: told from others by what the part said last, or by
what the kernel counts where it vanished.

Asked by the keepers of parts. Invariant: each kill that a node counts explains one death there, the first that
asks, and never that of a part which started after it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from laminar_py.records.codec import decode, encode
from laminar_py.runtime.cluster.backend import on_node
from laminar_py.runtime.cluster.errors import PartDiedError, ProcessLostError, for_memory
from laminar_py.runtime.cluster.part import Part

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
LOOK_S = 20.0  # a process starts on another node for it


class Kills(msgspec.Struct, frozen=True):
    """Processes that the kernel has ended for want of memory so far, e.g. `Kills(2, own=True)`."""

    count: int
    own: bool  # of this process's control group; else of the whole host, whose others may have been meant


def kernel_kills() -> bytes:
    """The `Kills` of this process's control group, or of the host where the group does not count."""
    for path, own in [*((path, True) for path in _counters_of_group()), (PROC / "vmstat", False)]:
        with suppress(OSError):
            for name, _, count in (line.partition(" ") for line in path.read_text().splitlines()):
                if name == "oom_kill":
                    return encode(Kills(int(count), own))
    return encode(Kills(0, own=False))


def _counters_of_group() -> Iterator[Path]:
    """Files that may hold the count of this process's group; in a container the group's folder is the topmost."""
    with suppress(OSError):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            _, kinds, group = line.split(":", 2)
            if not kinds:
                yield from (folder / "memory.events" for folder in (GROUPS / group.lstrip("/"), GROUPS))
            elif kinds == "memory":
                top = GROUPS / "memory"
                yield from (folder / "memory.oom_control" for folder in (top / group.lstrip("/"), top))


class KernelKills:
    """Counts of `kernel_kills` as each part found them on its node, and the kills that explained a death."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, int]] = {}  # part -> its Ray node, and the count there when last asked
        self._told: set[tuple[str, int]] = set()  # kills that explained a death: Ray node, and its count then

    async def meet(self, part: Part) -> None:
        """Take the count of the node of a part that has started."""
        if part.place.node is not None:
            self._found[part.name] = part.place.node, (await part.ask(Kills, "kernel_kills")).count

    async def explain(self, death: PartDiedError, node: str | None) -> PartDiedError:
        """The death of a part on that node; one that vanished as the kernel ended a process for memory says so."""
        home, before = self._found.get(death.part, (None, 0))
        if not death.vanished or home is None or home != node or for_memory(death.reason):
            return death
        try:
            async with asyncio.timeout(LOOK_S):
                found = decode(Kills, await on_node(node, kernel_kills))
        except (ProcessLostError, TimeoutError):  # it is gone or hangs, which explains the death
            return death
        self._found[death.part] = node, found.count
        kills = ((node, count) for count in range(before + 1, found.count + 1))
        kill = next((kill for kill in kills if kill not in self._told), None)
        if kill is None:
            return death
        self._told.add(kill)
        cause = "the kernel ended a process" if found.own else "the kernel ended a process of its host, perhaps it"
        return PartDiedError(death.part, f"out of memory: {cause} ({death.reason})", vanished=True)
