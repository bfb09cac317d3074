"""Frames between the controller and its replicas, and the orders in them. No behaviour.

A replica speaks first. Both sides number what they say in one life of the replica, from 1, and say again what the
other has not heard; what comes twice, or after something that was missed, is passed over.

    Up(label, number, heard)           -> Down(first, orders)   it is there: orders that waited for it come
    Up(label, number, heard, report)   -> Down(told)            a report is sent until it is told; one at a time
    Down(first, orders)                -> Up(heard)             orders are sent until they are heard, in order
    Look(id), Expect(id)               -> Up(report, answers)   answers come with a report that goes at once
"""

from typing import Annotated, TypeAlias

import msgspec

from laminar_py.records.replica import Assignment, ReplicaReport, Survey

Count = Annotated[int, msgspec.Meta(ge=0)]
MOST_LABEL = 100  # characters, and bytes: what a peer may be named
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_LABEL)]


class Command(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of what the controller has a replica do."""


class Submit(Command, frozen=True):
    """Run these."""

    assignments: list[Assignment]


class Abort(Command, frozen=True):
    """End these wherever they are."""

    trajectory_ids: list[str]


class GiveUp(Command, frozen=True):
    """End these, which go on elsewhere, and report them at once."""

    trajectory_ids: list[str]


class CallOff(Command, frozen=True):
    """Expect these trajectories, and more of these passes, no more."""

    names: list[str]


class Stop(Command, frozen=True):
    """Interrupt all training, and evaluations too if `evaluations`."""

    evaluations: bool


class Follow(Command, frozen=True):
    """Pull weights from the relay at this endpoint from now on."""

    relay: str


class Look(Command, frozen=True):
    """Reply with a survey."""

    id: Count


class Expect(Command, frozen=True):
    """Reply whether it keeps `version` until all of these have come or are called off."""

    id: Count
    version: int
    trajectory_ids: list[str]


Order: TypeAlias = Submit | Abort | GiveUp | CallOff | Stop | Follow | Look | Expect


class Reply(msgspec.Struct, frozen=True):
    """Reply to the `Look` or `Expect` of that id."""

    id: Count
    survey: Survey | None = None
    promised: bool = False


class Up(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Word of a replica, e.g. `Up(label="replica-0-1-3", number=0, heard=0)`: without a report, what was heard."""

    label: Label  # of the replica's life, as of its segments
    number: Count  # of the report
    heard: Count  # number of the last order that came
    report: ReplicaReport | None = None
    answers: tuple[Reply, ...] = ()


class Down(msgspec.Struct, frozen=True, array_like=True):
    """Word of the controller: the last report that it took in, and orders numbered from `first`."""

    told: Count
    first: Count = 0
    orders: tuple[msgspec.Raw, ...] = ()
