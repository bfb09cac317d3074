"""The label of a run, from what the kernel and the owner saw; what the program says of itself comes last."""

import os
import signal
from dataclasses import dataclass

import msgspec

from laminar_py.sandbox.inside.homes import MOST_ENTRIES
from laminar_py.sandbox.inside.limits import SandboxLimits
from laminar_py.sandbox.inside.program import DETAIL_CHARS, Claim
from laminar_py.sandbox.records import SandboxLabel

CLAIMED = {kind: SandboxLabel(kind) for kind in ("memory", "processes", "network", "files")}
CPU_SLACK_S = 0.2  # between the kernel's clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Facts of a run that ended, e.g. `Evidence(status=0, claim=Claim(finished=True))`."""

    status: int | None  # as `waitpid` has it; None: a session that lives on
    claim: Claim
    ended: str = ""  # by the zygote: `wall`, `folder`, `asked`
    cpu_s: float = 0.0
    num_oom_kills: int = 0  # of the slot's cgroup
    num_refused: int = 0  # processes, by the slot's cgroup
    too_long: bool = False  # output, errors or report


def label(evidence: Evidence, limits: SandboxLimits) -> tuple[SandboxLabel, str]:
    """Label and one line why."""
    number = exit_code(evidence.status)
    stopped = _name(-number) if number is not None and number < 0 else ""
    if evidence.too_long:
        return SandboxLabel.OUTPUT, f"more than {limits.output_bytes} bytes"
    if evidence.num_oom_kills:
        return SandboxLabel.MEMORY, f"more than {limits.memory_bytes} bytes"
    if evidence.num_refused:
        return SandboxLabel.PROCESSES, f"more than {limits.processes}, {evidence.num_refused} refused"
    if evidence.ended == "folder":
        return SandboxLabel.FILES, f"more than {limits.file_bytes} bytes or {MOST_ENTRIES} names"
    if stopped == "SIGXFSZ":
        return SandboxLabel.FILES, f"more than {limits.file_bytes} bytes"
    if evidence.ended == "wall":
        return SandboxLabel.TIME, f"more than {limits.wall_s:g} s, {evidence.cpu_s:.1f} s of them on the CPU"
    if stopped == "SIGXCPU" or (stopped == "SIGKILL" and evidence.cpu_s > limits.cpu_s - CPU_SLACK_S):
        return SandboxLabel.TIME, f"more than {limits.cpu_s:g} s on the CPU"
    if stopped:
        return SandboxLabel.CRASH, f"ended by {stopped}"
    claim = evidence.claim
    if number == 0 or (number is None and not claim.detail):
        return SandboxLabel.OK, ""
    return CLAIMED.get(claim.kind, SandboxLabel.ERROR), claim.detail or f"exit code {number}"


def exit_code(status: int | None) -> int | None:
    """Exit code, or the negative number of the signal that ended it; None of a session that lives on."""
    return None if status is None else os.waitstatus_to_exitcode(status)


def _name(number: int) -> str:
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


def read_claim(text: bytes) -> Claim:
    """A report; an empty one where a program wrote what is none."""
    try:
        claim = msgspec.json.decode(text, type=Claim)
    except (msgspec.DecodeError, RecursionError):  # a program's bytes
        return Claim()
    claim.detail = " ".join(claim.detail.split())[:DETAIL_CHARS]
    return claim
