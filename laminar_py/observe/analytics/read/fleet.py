"""Size of a run's fleet over time, which `laminar scale` changes: who was there when, and for how long. Pure.

A replica is there from the start of its incarnation, or of its process where it joined later, until it has left or
the next incarnation begins. A record of before there were such events has the replicas of its config throughout.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from laminar_py.config.run import RunConfig
from laminar_py.observe.analytics.read.columns import Ints, Times
from laminar_py.observe.analytics.read.history import Happened
from laminar_py.records.events import PartStarted, ReplicaLeft, RunStarted, Scaled
from laminar_py.records.metrics import FleetRow

_REPLICA = re.compile(r"replica-(\d+)")


@dataclass(frozen=True, slots=True)
class Presence:
    """Times [P] in which replicas were there, on the clock of `History`; none of one replica overlap."""

    replica: Ints
    start_s: Times
    end_s: Times

    @property
    def replicas(self) -> list[int]:
        """Numbers of all that ever were there, ascending."""
        return sorted(set(self.replica.tolist()))


def find_presence(happened: Iterable[Happened], *, replicas: int) -> Presence:
    """Presence by the events of a run; `replicas` are those of its config, for a record without such events."""
    there: dict[int, float] = {}
    spans: list[tuple[int, float, float]] = []
    begins = False  # an incarnation does, whose first fleet is there at once

    def leave(replica: int, at_s: float) -> None:
        spans.append((replica, there.pop(replica), at_s))

    known = False
    for one in happened:
        event = one.event
        if isinstance(event, RunStarted):
            begins = True
            for replica in list(there):
                leave(replica, one.at_s)
        elif isinstance(event, Scaled):
            there |= dict.fromkeys(event.replicas, one.at_s) if begins else {}
            begins, known = False, True
        elif isinstance(event, PartStarted) and known and (match := _REPLICA.fullmatch(event.part)):
            there.setdefault(int(match[1]), one.at_s)
        elif isinstance(event, ReplicaLeft) and event.replica in there:
            leave(event.replica, one.at_s)
    spans += [(replica, start_s, math.inf) for replica, start_s in there.items()]
    if not known:
        spans = [(replica, -math.inf, math.inf) for replica in range(replicas)]
    of, start, end = zip(*spans, strict=True) if spans else ((), (), ())
    return Presence(np.array(of, np.int32), np.array(start, np.float64), np.array(end, np.float64))


def with_last_fleet(config: RunConfig, happened: Iterable[Happened]) -> RunConfig:
    """The config with as many replicas as the run was to have last, which remedies start from."""
    fleets = [one.event for one in happened if isinstance(one.event, Scaled)]
    if not fleets or len(fleets[-1].replicas) == config.rollout.replicas:
        return config
    rollout = config.rollout.model_copy(update={"replicas": len(fleets[-1].replicas)})
    return config.model_copy(update={"rollout": rollout})


@dataclass(frozen=True, slots=True)
class FleetSizes:
    """Number of replicas by seconds of RL, as rows of `fleet.jsonl` have it: `replicas[i]` from `at_s[i]` on."""

    at_s: tuple[float, ...] = ()
    replicas: tuple[int, ...] = ()

    def replica_seconds(self, rl_s: float) -> float:
        """Seconds of all replicas until then; the first number holds from the start of RL on."""
        edges = [0.0, *self.at_s[1:], math.inf]
        spans = zip(edges, edges[1:], self.replicas, strict=False)
        return sum(max(0.0, min(rl_s, end) - start) * count for start, end, count in spans)


NOT_KNOWN = FleetSizes()


def fleet_sizes(rows: Iterable[FleetRow]) -> FleetSizes:
    """Sizes by these rows, which are read once and not kept."""
    changes: list[tuple[float, int]] = []
    for row in rows:
        if not changes or len(row.running) != changes[-1][1]:
            changes.append((row.rl_s, len(row.running)))
    return FleetSizes(tuple(at_s for at_s, _ in changes), tuple(count for _, count in changes))
