"""Settings of the sandbox in which programs of the model run."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from laminar_py.config.section import ConfigError, Count, Seconds, Section


class WeakestSandbox(StrEnum):
    """Weakest fences that will do."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    NONE = "none"


def _whole(path: str) -> str:
    if not path.startswith("/") or path.strip("/") == "":
        raise ConfigError(f"sandbox.programs={path}: write a folder by its whole path, such as /usr")
    return path


class SandboxConfig(Section):
    """Fences around programs that the model writes. `laminar doctor` says which a machine offers."""

    require: WeakestSandbox = WeakestSandbox.LANDLOCK
    """Weakest tier that will do; the strongest that can be had is taken. `namespaces`: processes, users, mounts
    and network of its own, a root with Python and `programs` alone, and all of `landlock`. `landlock`: Landlock,
    seccomp, limits, a user of its own. `none`: limits alone, so that a program may read and reach what the run
    may; unsafe."""
    slots: Count = 2
    """Programs that run at the same time, in each scorer, and in each process of environments that runs code."""
    cpu_s: Seconds = 4.0
    """CPU time of a run, seconds."""
    wall_s: Seconds = 10.0
    """Wall time of a run, seconds."""
    memory_mib: Annotated[int, Field(ge=32)] = 256
    """Memory of a run, MiB."""
    programs: tuple[Annotated[str, AfterValidator(_whole)], ...] = ()
    """Folders of the host whose files code may read and run beside Python's own, such as `/usr`: for a shell, and
    for code that starts programs; needs the tier `namespaces`. What lies there the model may read."""
