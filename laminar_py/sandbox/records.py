"""Records of the sandbox: tiers, labels, results."""

from dataclasses import dataclass
from enum import Enum


class SandboxTier(Enum):
    """How strongly programs are fenced in, the strongest first."""

    NAMESPACES = "namespaces"
    """Own processes, users, mounts, network and root with Python alone, and all of the next tier."""
    LANDLOCK = "landlock"
    """Landlock, seccomp, limits, a user of its own where we are root; processes only where they can be ended."""
    NONE = "none"
    """Limits alone: programs may read, write and reach whatever the owner may. Unsafe."""

    @property
    def strength(self) -> int:
        """Larger is stronger."""
        return -list(SandboxTier).index(self)


class SandboxLabel(Enum):
    """How a run ended. By the kernel or the owner, unless marked as a claim: of an exception seen inside alone.

    A program may forge or hide claims, and leave with code 0 before its end: `ok` says that it ended well and
    nothing more. No label makes a wrong output right, since outputs are compared outside.
    """

    OK = "ok"
    """Exit code 0."""
    ERROR = "error"
    """Another exit code: an exception that is none of the others, for instance."""
    TIME = "time"
    """Seconds of CPU or of the wall used up."""
    MEMORY = "memory"
    """Memory used up: by the cgroup's count, or by a claim of `MemoryError`."""
    PROCESSES = "processes"
    """Too many processes and threads: by the cgroup's count, or by a claim."""
    NETWORK = "network"
    """A socket was refused, by a claim."""
    FILES = "files"
    """A file too large or the folder full, by the kernel; a path outside of it, by a claim."""
    OUTPUT = "output"
    """Output, errors or the returned value were longer than allowed."""
    CRASH = "crash"
    """Ended by another signal: a native crash, for instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """End of a run, e.g. `SandboxResult(label=SandboxLabel.OK, stdout="3\\n", exit_code=0, elapsed_s=0.004)`."""

    label: SandboxLabel
    detail: str = ""  # why, in one line; partly a claim
    stdout: str = ""  # up to the limit
    stderr: str = ""
    exit_code: int | None = None  # negative: the signal that ended it; None: a session that lives on
    elapsed_s: float = 0.0
    cpu_s: float = 0.0  # of all its processes; of a session's call its own claim
    finished: bool = False  # claim: the program's last line was reached, not left early by `exit`
    value_json: str | None = None  # returned by the function that was called; the program may return anything

    @property
    def alive(self) -> bool:
        """True where a session's variables are still there."""
        return self.exit_code is None


@dataclass(frozen=True, slots=True)
class TierOffer:
    """Row of a survey, e.g. `TierOffer(SandboxTier.NAMESPACES, False, "unshare: Operation not permitted")`."""

    tier: SandboxTier
    offered: bool
    reason: str = ""  # why not, or how it is weaker here than it could be


class SandboxError(RuntimeError):
    """A sandbox that does not work, by no fault of a program's; names the slot and what failed."""
