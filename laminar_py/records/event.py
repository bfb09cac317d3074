"""The base of all events, and those of parts and of a fleet that changes its size; others are in `events`."""

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=lambda name: name.lower()):
    """Base of all events; the tag is the class name in lower case."""


class Scaled(Event, frozen=True):
    """The replicas of the run from here on, e.g. `Scaled((0, 1, 4))`: others that there were leave.

    On record at the start of each incarnation, whose replicas are numbered from 0, and whenever that changes.
    """

    replicas: tuple[int, ...]
    servers: tuple[str, ...] = ()  # [replicas] that they attach to; empty where the run starts their engines


class ReplicaLeft(Event, frozen=True):
    """A replica that was to leave has nothing any more, and its process, if there was one, has ended."""

    replica: int
    reason: str = "scaled"  # or why it was taken out again: it could not start


class PartStarted(Event, frozen=True):
    """A supervised part runs, e.g. `PartStarted("replica-1", 4711)`."""

    part: str
    pid: int


class PartDied(Event, frozen=True):
    """A supervised part was found dead or hanging."""

    part: str
    reason: str
