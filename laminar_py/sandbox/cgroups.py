"""A cgroup of a slot: the kernel counts and bounds the memory and the processes of all that runs in it.

Both versions are used, where we may write: below our own cgroup, or beside it where its processes forbid that.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from laminar_py.sandbox.records import SandboxError

PREFIX = "laminar-sandbox-"
MINE = ("memory", "pids")
END_S, PAUSE_S = 5.0, 0.005  # for processes that were killed to be gone
NUM_OWN = 2  # processes of the slot itself


@dataclass(frozen=True, slots=True)
class CgroupCounts:
    """Events of a slot since its cgroup was made, e.g. `CgroupCounts(0, 3)`."""

    num_oom_kills: int
    num_refused: int  # processes

    def since(self, before: "CgroupCounts") -> "CgroupCounts":
        """Events after `before`."""
        return CgroupCounts(self.num_oom_kills - before.num_oom_kills, self.num_refused - before.num_refused)


class SlotCgroup:
    """Folders of a cgroup: one for both controllers, or in version 1 one for each."""

    def __init__(self, memory: Path, pids: Path) -> None:
        self.folders = sorted({memory, pids})
        self._memory = memory
        self._pids = pids
        self._old = (memory / "memory.oom_control").exists()  # version 1
        self._own_bytes = 0
        self._limits = (0, 0)

    @property
    def joins(self) -> list[str]:
        """Files by which a process joins."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def measure(self) -> None:
        """Take what is used now as the slot's own, which no program pays for."""
        name = "memory.usage_in_bytes" if self._old else "memory.current"
        self._own_bytes = int((self._memory / name).read_text())
        self._limits = (0, 0)

    def limit(self, *, memory_bytes: int, processes: int) -> None:
        """Bounds for programs from here on."""
        if (memory_bytes, processes) == self._limits:
            return
        total = str(memory_bytes + self._own_bytes)
        hard = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if self._old else ("memory.max",)
        files = [self._memory / name for name in hard if (self._memory / name).exists()]
        for file in reversed(files):  # the second may not be below the first
            file.write_text("-1" if self._old else total)
        for file in files:
            file.write_text(total)
        if not self._old and (swap := self._memory / "memory.swap.max").exists():
            swap.write_text("0")
        (self._pids / "pids.max").write_text(str(processes + NUM_OWN))
        self._limits = (memory_bytes, processes)

    def counts(self) -> CgroupCounts:
        """Events up to now."""
        events = self._memory / ("memory.oom_control" if self._old else "memory.events")
        return CgroupCounts(_number(events, "oom_kill"), _number(self._pids / "pids.events", "max"))

    def end_all(self) -> None:
        """Wait until nothing runs in it, and end what does."""
        for folder in self.folders:
            _end_all(folder)


def make(name: str) -> "SlotCgroup | None":
    """A cgroup of this name, or None where we may make none with both controllers."""
    own = _own_folders()
    if not own.keys() >= set(MINE):
        return None
    if own["memory"] != own["pids"]:
        memory, pids = (_try(own[kind] / name, kind) for kind in MINE)
    else:
        above = (own["memory"], own["memory"].parent)
        memory = pids = next((found for folder in above if (found := _try(folder / name, *MINE))), None)
    if memory is None or pids is None:
        for folder in (memory, pids):
            if folder is not None:
                remove(folder)
        return None
    return SlotCgroup(memory, pids)


def remove(folder: Path) -> None:
    """End all in a cgroup and remove it; for those that this module made, here or in a run that was killed."""
    assert folder.name.startswith(PREFIX), folder
    if folder.exists():
        _end_all(folder)
        folder.rmdir()


def _end_all(folder: Path) -> None:
    deadline = time.monotonic() + END_S
    while processes := (folder / "cgroup.procs").read_text().split():
        for process in processes:
            try:
                os.kill(int(process), signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise SandboxError(f"{folder}: processes {', '.join(processes)} do not end")
        time.sleep(PAUSE_S)  # nothing tells of the last one's end


def _own_folders() -> dict[str, Path]:
    """Folder of our own cgroup by controller, as far as it is mounted where we can see it."""
    paths: dict[str, str] = {}
    for line in _lines("/proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    found: dict[str, Path] = {}
    for line in _lines("/proc/self/mountinfo"):
        left, right = line.split(" - ")
        root, point = left.split()[3:5]
        system, _, options = right.split()
        kinds = {"cgroup": [kind for kind in MINE if kind in options.split(",")], "cgroup2": [""]}.get(system, [])
        for kind in kinds:
            path = paths.get(kind, "")
            if path.startswith(root):
                found[kind] = Path(point) / os.path.relpath(path, root)
    if "" in found and not found.keys() & set(MINE):
        found |= dict.fromkeys(MINE, found[""])
    return found


def _try(folder: Path, *kinds: str) -> Path | None:
    """Make a cgroup that has these controllers and that we may join; None where that is refused."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError:  # read-only, not ours, or no such thing
        return None
    wanted = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max",)}
    controlled = all(any(os.access(folder / name, os.W_OK) for name in wanted[kind]) for kind in kinds)
    if controlled and os.access(folder.parent / "cgroup.procs", os.W_OK):  # version 2 asks for that too
        return folder
    folder.rmdir()
    return None


def _number(file: Path, name: str) -> int:
    words = file.read_text().split()
    return int(words[words.index(name) + 1]) if name in words else 0


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
