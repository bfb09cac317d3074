"""Records of the sandbox: tiers, results, and the label that tells how a run ended.

A label rests on facts that the kernel and the owner saw. The program's own report (its `Claim`) counts last.
"""

import os
import signal
from dataclasses import dataclass
from enum import Enum

import msgspec

from laminar_contrib.sandbox.inside.fences import MOST_THREADS
from laminar_contrib.sandbox.inside.home import MOST_ENTRIES
from laminar_contrib.sandbox.inside.messages import SandboxLimits
from laminar_contrib.sandbox.inside.program import DETAIL_CHARS, Claim


class SandboxTier(Enum):
    """Strength of the fences around a program, the strongest first."""

    LANDLOCK = "landlock"
    """Landlock, seccomp, no capabilities, limits. A program is a single process."""
    NONE = "none"
    """Limits alone: programs may read, write and reach whatever the owner may. Unsafe."""


class SandboxLabel(Enum):
    """How a run ended, as the kernel or the owner saw it.

    A program may exit with code 0 early. So `ok` says only that the program exited well, and the owner compares
    outputs outside the sandbox.
    """

    OK = "ok"
    """Exit code 0."""
    ERROR = "error"
    """Another exit code, for example after an exception, such as `MemoryError` or one of a refused call."""
    TIME = "time"
    """Seconds of CPU or of the wall used up."""
    FILES = "files"
    """A file was too large, or the folder was full."""
    THREADS = "threads"
    """More threads than allowed."""
    OUTPUT = "output"
    """Output, errors or the returned value were longer than allowed."""
    CRASH = "crash"
    """Ended by another signal, for example a native crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """End of a run, e.g. `SandboxResult(label=SandboxLabel.OK, stdout="3\\n", exit_code=0, elapsed_s=0.004)`."""

    label: SandboxLabel
    detail: str = ""  # why, in one line; partly a claim
    stdout: str = ""  # up to the limit
    stderr: str = ""
    exit_code: int | None = None  # negative: the signal that ended it; None: a session that lives on
    elapsed_s: float = 0.0
    cpu_s: float = 0.0  # of a session's call its own claim
    value_json: str | None = None  # returned by the function that was called; the program may return anything

    @property
    def alive(self) -> bool:
        """True if the session still has its variables."""
        return self.exit_code is None


class SandboxError(RuntimeError):
    """The sandbox itself failed, not the program in it. The message names the slot and the failure."""


CPU_SLACK_S = 0.2  # between the kernel's clocks


def label(
    limits: SandboxLimits,
    claim: Claim,
    *,
    status: int | None,
    ended: str = "",
    cpu_s: float = 0.0,
    too_long: bool = False,
) -> tuple[SandboxLabel, str]:
    """Return the label of a run, and one line that says why.

    `status` is that of `waitpid`; None for a session that lives on. `ended` is the zygote's reason to end the run:
    `wall`, `folder`, `threads`, `asked`. `too_long` is True for output, errors or a report above the limit.
    """
    number = exit_code(status)
    stopped = _signal_name(-number) if number is not None and number < 0 else ""
    if too_long:
        return SandboxLabel.OUTPUT, f"more than {limits.output_bytes} bytes"
    if ended == "folder":
        return SandboxLabel.FILES, f"more than {limits.file_bytes} bytes or {MOST_ENTRIES} names"
    if ended == "threads":
        return SandboxLabel.THREADS, f"more than {MOST_THREADS} threads"
    if stopped == "SIGXFSZ":
        return SandboxLabel.FILES, f"more than {limits.file_bytes} bytes"
    if ended == "wall":
        return SandboxLabel.TIME, f"more than {limits.wall_s:g} s, {cpu_s:.1f} s of them on the CPU"
    if stopped == "SIGXCPU" or (stopped == "SIGKILL" and cpu_s > limits.cpu_s - CPU_SLACK_S):
        return SandboxLabel.TIME, f"more than {limits.cpu_s:g} s on the CPU"
    if stopped:
        return SandboxLabel.CRASH, f"ended by {stopped}"
    if number == 0 or (number is None and not claim.detail):
        return SandboxLabel.OK, ""
    return SandboxLabel.ERROR, claim.detail or f"exit code {number}"


def exit_code(status: int | None) -> int | None:
    """Return the exit code of a status, or minus the number of its signal; None for a session that lives on."""
    return None if status is None else os.waitstatus_to_exitcode(status)


def _signal_name(number: int) -> str:
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


def read_claim(text: bytes) -> Claim:
    """Decode the report of a program; an empty report if the program wrote something else."""
    try:
        claim = msgspec.json.decode(text, type=Claim)
    except (msgspec.DecodeError, RecursionError):  # a program's bytes
        return Claim()
    claim.detail = " ".join(claim.detail.split())[:DETAIL_CHARS]
    return claim
