"""Frames between the controller and its replicas, and the commands in them. No behaviour.

A replica sends the first frame. In one life of a replica, reports and commands are numbered from 1. Each side
resends until the other acknowledges, and ignores duplicates and frames that follow a lost one.

    ReportFrame(number, report)   -> CommandFrame(reports_received)   until acknowledged, one report at a time
    CommandFrame(first, commands) -> ReportFrame(commands_received)   until acknowledged, in order
    Look(id), Expect(id)          -> ReportFrame(report, answers)     the report is sent at once
"""

from typing import Annotated, TypeAlias

import msgspec

from laminar_py.records.replica import Assignment, ReplicaReport, Survey

Count = Annotated[int, msgspec.Meta(ge=0)]
MOST_LABEL = 100  # characters, and bytes: what a peer may be named


class CommandBase(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of the commands that the controller sends to a replica."""


class Submit(CommandBase, frozen=True):
    """Start these trajectories."""

    assignments: list[Assignment]


class Abort(CommandBase, frozen=True):
    """End these trajectories, whether they wait or run."""

    trajectory_ids: list[str]


class GiveUp(CommandBase, frozen=True):
    """End these trajectories and report them at once: they continue on other replicas."""

    trajectory_ids: list[str]


class CallOff(CommandBase, frozen=True):
    """Stop waiting for these trajectories, and for further ones of these evaluation passes."""

    names: list[str]


class Stop(CommandBase, frozen=True):
    """Interrupt all training, and evaluations too if `evaluations`."""

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


Command: TypeAlias = Submit | Abort | GiveUp | CallOff | Stop | Follow | Look | Expect


class Reply(msgspec.Struct, frozen=True):
    """Answer to the `Look` or `Expect` of this id."""

    id: Count
    survey: Survey | None = None
    promised: bool = False


class ReportFrame(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Frame of a replica, e.g. `ReportFrame(number=1, commands_received=0, report=report)`.

    The sender's ZeroMQ identity is the label of the replica's life, which its segments have too.
    """

    number: Count  # of the report
    commands_received: Count  # number of the last command that came
    report: ReplicaReport
    answers: tuple[Reply, ...] = ()


class CommandFrame(msgspec.Struct, frozen=True, array_like=True):
    """Frame of the controller: the number of the last accepted report, and commands numbered from `first`."""

    reports_received: Count
    first: Count = 0
    commands: tuple[msgspec.Raw, ...] = ()
