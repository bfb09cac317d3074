"""Frames between the controller and its replicas, and the commands in them. No behaviour.

A replica sends the first frame. In one life of a replica, reports and commands are numbered from 1. Each side
resends until the other acknowledges, and ignores duplicates and frames that follow a lost one.

    ReportFrame(number, report)   -> CommandFrame(reports_received)   until acknowledged, one report at a time
    CommandFrame(first, commands) -> ReportFrame(commands_received)   until acknowledged, in order
    Look, Expect, Hold, Unhold    -> ReportFrame(report, answers)     the report is sent at once
"""

from typing import Annotated, TypeAlias

import msgspec

from laminar_py.records.engine import PauseMode
from laminar_py.records.replica import Assignment, ReplicaReport, Survey

Count = Annotated[int, msgspec.Meta(ge=0)]
MOST_LABEL = 100  # bytes of a label, which is the name of a replica's socket


class CommandBase(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of the commands that the controller sends to a replica."""


class Submit(CommandBase, frozen=True):
    """Start these trajectories."""

    assignments: list[Assignment]


class Abort(CommandBase, frozen=True):
    """End these trajectories, whether they wait or run."""

    trajectory_ids: list[str]


class GiveUp(CommandBase, frozen=True):
    """End these trajectories and report their tokens at once, since they move to other replicas."""

    trajectory_ids: list[str]


class CallOff(CommandBase, frozen=True):
    """Stop waiting for these trajectories, and for further trajectories of these evaluation passes."""

    names: list[str]  # ids of trajectories or passes


class Stop(CommandBase, frozen=True):
    """Start no further trajectory; interrupt all training trajectories, and with `evaluations` all others."""

    evaluations: bool


class Follow(CommandBase, frozen=True):
    """Pull weights from the relay at this endpoint from now on."""

    relay: str


class Look(CommandBase, frozen=True):
    """Answer with a survey of all running and waiting trajectories."""

    id: Count


class Expect(CommandBase, frozen=True):
    """Answer whether the replica keeps `version` until these trajectories have arrived or are called off."""

    id: Count
    version: int
    trajectory_ids: list[str]


class Hold(CommandBase, frozen=True):
    """Stop computing, and pause requests by `mode`; answer once nothing computes."""

    id: Count
    mode: PauseMode


class Unhold(CommandBase, frozen=True):
    """Compute again; answer then."""

    id: Count


Command: TypeAlias = Submit | Abort | GiveUp | CallOff | Stop | Follow | Look | Expect | Hold | Unhold


class Reply(msgspec.Struct, frozen=True):
    """Answer to the `Look`, `Expect`, `Hold` or `Unhold` of this id."""

    id: Count
    survey: Survey | None = None  # for a `Look`
    promised: bool = False  # for an `Expect`


class ReportFrame(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Frame of a replica, e.g. `ReportFrame(number=1, commands_received=0, report=report)`.

    The sender's ZeroMQ identity is the label of its process, which also names the segments of the process.
    """

    number: Count  # of the report
    commands_received: Count  # number of the last command that arrived
    report: ReplicaReport
    answers: tuple[Reply, ...] = ()


class CommandFrame(msgspec.Struct, frozen=True, array_like=True):
    """Frame of the controller: the number of the last accepted report, and commands numbered from `first`."""

    reports_received: Count
    first: Count = 0
    commands: tuple[msgspec.Raw, ...] = ()  # each an encoded `Command`
