"""Frames between the owner of a slot and its zygote: four bytes of length, then JSON; descriptors ride along.

    owner -> zygote   SlotSetup, then any number of SlotOrder
    zygote -> owner   SlotNews: `map` (write my user map), `ready`, `fault` (and it ends), `end` (of a run)

The zygote reads nothing of a program's and the owner nothing that a program can write in here: what programs are
given and leave lies in files of their own, whose descriptors come with the order.
"""

import json
import socket
from dataclasses import asdict, dataclass

from laminar_py.sandbox.inside.limits import SandboxLimits

HEADER = 4
MOST_BYTES = 1 << 16  # of a frame here
MOST_DESCRIPTORS = 8
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
    fields = json.loads(text)
    return SlotOrder(**{**fields, "limits": SandboxLimits(**fields["limits"])})


def receive(control: socket.socket) -> tuple[bytes, list[int]] | None:
    """The next frame and the descriptors that came with it; None at the end."""
    head, descriptors, _, _ = socket.recv_fds(control, HEADER, MOST_DESCRIPTORS)
    if len(head) < HEADER:
        return None
    text = exactly(control, int.from_bytes(head, "big"))
    return None if text is None else (text, descriptors)


def exactly(source: socket.socket, number: int) -> bytes | None:
    """So many bytes; None where the end came first."""
    text = b""
    while len(text) < number:
        more = source.recv(number - len(text))
        if not more:
            return None
        text += more
    return text
