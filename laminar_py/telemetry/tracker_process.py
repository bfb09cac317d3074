"""The process of one tracker: takes messages from standard input and answers each with a byte when it is done.

Started by `tracking.TrackerLink`. START -> (message, answer)* -> END. A message is its length in four bytes,
little-endian, and MessagePack; the first is an `Opening`. It ends when a `Closing` is answered, when its
controller is gone, or with the error of its tracker; then the controller starts another, which goes on with the
tracker's run.
"""

import os
import signal
import struct
import sys
from typing import TypeVar

import msgspec

from laminar_py.records.codec import decode, encode
from laminar_py.telemetry.trackers import TRACKERS, Opening, Tracker

GRACE_S = 30  # to say goodbye when the controller is gone
NICENESS = 10
ANSWER = b"."
HEADER = struct.Struct("<I")

T = TypeVar("T")


class Values(msgspec.Struct, frozen=True, tag=True):
    """For `Tracker.log`."""

    step: int
    values: dict[str, float]


class Undone(msgspec.Struct, frozen=True, tag=True):
    """For `Tracker.undo`."""

    step: int


class Closing(msgspec.Struct, frozen=True, tag=True):
    """For `Tracker.close`."""

    summary: dict[str, float] | None


Message = Values | Undone | Closing


def frame(message: Opening | Message) -> bytes:
    """As it travels."""
    body = encode(message)
    return HEADER.pack(len(body)) + body


def read(kind: type[T]) -> T | None:
    """The next message; None if the controller is gone."""
    header = sys.stdin.buffer.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    body = sys.stdin.buffer.read(length)
    return decode(kind, body) if len(body) == length else None


def serve(tracker: Tracker, answers: int) -> bool:
    """Until the tracker is closed; False if the controller is gone before."""
    while answer(answers):
        match read(Message):  # type: ignore[arg-type]
            case Values(step, values):
                tracker.log(step, values)
            case Undone(step):
                tracker.undo(step)
            case Closing(summary):
                tracker.close(summary)
                answer(answers)
                return True
            case None:
                return False
    return False


def answer(answers: int) -> bool:
    """Say that it is done; whether somebody is there to hear it."""
    try:
        return os.write(answers, ANSWER) > 0
    except BrokenPipeError:
        return False


def main() -> None:
    """Until the run is over, or one side is gone."""
    os.nice(NICENESS)
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where libraries may print what they like
    opening = read(Opening)
    if opening is None:
        return
    tracker = TRACKERS[opening.kind](opening)
    if not serve(tracker, answers):
        signal.alarm(GRACE_S)
        tracker.close(None)


if __name__ == "__main__":
    main()
