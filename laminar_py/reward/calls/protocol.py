"""Frames between a scorer and the processes that call reward functions for it.

A frame is four bytes of length and as many of MessagePack. The scorer sends a `CallStart` and gets a
`CallStarted`; then it sends `CallRequest`s, and each is answered by a `CallAnswer` with its number, in any order.
The process ends when its input does.
"""

import struct

import msgspec

from laminar_py.records.columns import Column
from laminar_py.records.scoring import ScoringRequest
from laminar_py.reward.outcome import Outcome

MAX_FRAME_BYTES = 1 << 28  # of an answer: its length comes from a process that runs a user's code

header = struct.Struct("<I")


class CallStart(msgspec.Struct, frozen=True, kw_only=True):
    """Order to a process, e.g. to call the term `exact`: its settings as JSON, and 10 s for each response."""

    term: str
    timeout_s: float
    columns: list[Column] = []
    record: str | None = None  # folder of the run, which the function may not write to
    hang_log: str  # file that takes the stacks of a call which is not over `LATE_S` after its limit


class CallStarted(msgspec.Struct, frozen=True):
    """The function is there, and how many responses it takes at a time; or why there is none, for the user."""

    at_once: int = 1
    fault: str | None = None


class CallRequest(msgspec.Struct, frozen=True, array_like=True):
    """A response to score."""

    number: int
    request: ScoringRequest


class CallAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of a request, or the traceback of a mistake of ours."""

    number: int
    outcome: Outcome | None
    bug: str = ""
