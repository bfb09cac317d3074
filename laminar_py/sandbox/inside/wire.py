"""Frames between our processes and those that run code of others. The standard library alone is imported here.

**Zygotes.** Four bytes of length, then JSON; descriptors ride along.

    owner -> zygote   SlotSetup, then any number of SlotOrder
    zygote -> owner   SlotNews: `map` (write my user map), `ready`, `fault` (and it ends), `end` (of a run)

The zygote reads nothing of a program's and the owner nothing that a program can write in here: what programs are
given and leave lies in files of their own, whose descriptors come with the order.

**Hosted processes** (`sandbox.hosted`). Four bytes of length, four of the call's number, then a body in the form
that both sides agreed on. The owner sends calls, in any number at a time, and each has one answer with its number.
An empty body cancels the call. A hosted process ends when its socket does.
"""

import json
import socket
import struct
import sys
from dataclasses import asdict, dataclass, fields

HEADER = 4
MOST_BYTES = 1 << 16  # of a frame here
MOST_DESCRIPTORS = 8
CALL = struct.Struct("<II")  # length of a body, number of its call


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


DEFAULTS = SandboxLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSetup:
    """First frame: how the slot is fenced."""

    tier: str
    folder: str  # empty, of the slot alone
    readable: list[str]  # shared libraries that extension modules may need, and folders of programs
    uids: list[int]  # of the zygote and of its programs on the host; empty: the owner's own
    cgroups: list[str]  # files to join them by
    alone: bool  # programs may start no process, since nothing here could count or end them
    counted: bool  # a cgroup counts processes and memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOrder:
    """Order to the zygote: `run` (five descriptors come with it, six for a session), `pause`, `resume`, `end`."""

    kind: str
    limits: SandboxLimits = DEFAULTS
    session: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNews:
    """Answer of the zygote, e.g. `SlotNews(kind="end", status=0, cpu_s=0.002, elapsed_s=0.004)`."""

    kind: str
    detail: str = ""
    status: int = 0  # of the program, as `waitpid` has it
    ended: str = ""  # by the zygote: `wall`, `folder` (it is full) or `asked`
    cpu_s: float = 0.0  # of the program and of all below it
    elapsed_s: float = 0.0


def frame(record: SlotSetup | SlotOrder | SlotNews) -> bytes:
    """The bytes of a record."""
    text = json.dumps(asdict(record)).encode()
    return len(text).to_bytes(HEADER, "big") + text


def read_setup(text: bytes) -> SlotSetup:
    """The record that the owner sent first."""
    return SlotSetup(**json.loads(text))


def read_order(text: bytes) -> SlotOrder:
    """An order of the owner's."""
    order = json.loads(text)
    return SlotOrder(**{**order, "limits": SandboxLimits(**order["limits"])})


def receive(control: socket.socket) -> tuple[bytes, list[int]] | None:
    """The next frame and the descriptors that came with it; None at the end."""
    head, descriptors, _, _ = socket.recv_fds(control, HEADER, MOST_DESCRIPTORS)
    if len(head) < HEADER:
        return None
    text = exactly(control, int.from_bytes(head, "big"))
    return None if text is None else (text, descriptors)


def own_control() -> socket.socket:
    """The socket to the owner, by the descriptor in the first argument; no process started here inherits it."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    return control


def call_frame(number: int, body: bytes) -> bytes:
    """The bytes of a call, or of its answer."""
    return CALL.pack(len(body), number) + body


def receive_call(control: socket.socket) -> tuple[int, bytes] | None:
    """Number and body of the next call; None at the end."""
    head = exactly(control, CALL.size)
    if head is None:
        return None
    size, number = CALL.unpack(head)
    body = exactly(control, size)
    return None if body is None else (number, body)


def exactly(source: socket.socket, number: int) -> bytes | None:
    """So many bytes; None where the end came first."""
    text = b""
    while len(text) < number:
        more = source.recv(number - len(text))
        if not more:
            return None
        text += more
    return text
