"""Limits of one run. The standard library alone is imported here: the inside of a sandbox has nothing else."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Bounds of one run, or of one call of a session, e.g. `SandboxLimits(cpu_s=2.0, wall_s=4.0)`.

    Raises `ValueError` where one of them is not above 0.
    """

    cpu_s: float = 5.0
    """Seconds of CPU time that each of its processes may use; rounded up to whole seconds."""
    wall_s: float = 10.0
    """Seconds from its start to its end; on a busy machine a program may need more of them than of CPU time."""
    memory_bytes: int = 256 << 20
    """Memory of all its processes and files where a cgroup counts it, else address space of each process."""
    processes: int = 16
    """Processes and threads at one time, the program itself among them."""
    file_bytes: int = 16 << 20
    """Size of its private folder, hence of any file."""
    output_bytes: int = 1 << 20
    """Size of each of what it prints, its errors, and the value that it returns."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)}: give a number above 0")
