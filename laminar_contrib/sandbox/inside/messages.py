"""Messages between a slot and its zygote, as bodies of calls (`laminar_py.children`), in JSON.

The first call is a `SlotSetup`, each further one a `SlotCommand`, or a `SlotPause` while a session runs. Each
answer is a `SlotNews`: `ready`, `fault` (and it exits), `end` (of a run), `paused`. Input and output of a program
lie in files of their own, whose descriptors come with the command. So a program cannot write into this socket, and
the zygote reads nothing that a program wrote.
"""

import json
from dataclasses import asdict, dataclass, fields

from laminar_py.children import call_frame

HEADER = 4  # bytes before a text between the owner and a program: its length


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one run, or of one call of a session, e.g. `SandboxLimits(cpu_s=2.0, wall_s=4.0)`.

    Raises `ValueError` if a limit is not above 0.
    """

    cpu_s: float = 5.0
    """Seconds of CPU time, rounded up to whole seconds."""
    wall_s: float = 10.0
    """Seconds from start to end. On a busy machine a program may need more of them than of CPU time."""
    memory_bytes: int = 256 << 20
    """Address space."""
    file_bytes: int = 16 << 20
    """Size of the program's private folder, hence of any file."""
    output_bytes: int = 1 << 20
    """Size of standard output, of standard error, and of the returned value, each."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)}: give a number above 0")


DEFAULTS = SandboxLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSetup:
    """First call."""

    home: str  # a path at which nothing exists; the zygote makes it a folder, and removes it at the end
    walls: bool  # False: limits alone


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCommand:
    """Command to the zygote to run a program, with five descriptors, or six for a session."""

    limits: SandboxLimits = DEFAULTS
    session: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPause:
    """Command to the zygote to stop the program of a session between two calls, or to continue it."""

    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNews:
    """Answer of the zygote, e.g. `SlotNews(kind="end", status=0, cpu_s=0.002, elapsed_s=0.004)`."""

    kind: str
    detail: str = ""
    status: int = 0  # of the program, as `waitpid` has it
    ended: str = ""  # by the zygote: `wall`, `folder` (it is full), `threads` (too many) or `asked`
    cpu_s: float = 0.0  # of the program
    elapsed_s: float = 0.0


def read_setup(body: bytes) -> SlotSetup:
    """Decode the owner's first call."""
    return SlotSetup(**json.loads(body))


def read_command(body: bytes) -> SlotCommand | SlotPause:
    """Decode a command of the owner."""
    command = json.loads(body)
    if "paused" in command:
        return SlotPause(**command)
    return SlotCommand(**{**command, "limits": SandboxLimits(**command["limits"])})


def news_frame(number: int, news: SlotNews) -> bytes:
    """Encode a zygote's answer to a call."""
    return call_frame(number, json.dumps(asdict(news)).encode())
