"""Trajectories that outlived their replica: how long each waited for another. Reads only.

Called by the kill test and by tests. `run` is a run folder; a run without a readable ledger is a `ValueError`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import decode_event
from laminar_py.records.events import Assigned, Interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Trajectory of a crashed replica, e.g. `Handover("g7-3", 1, 41, 1700000000.2, 0, 0.05)`."""

    trajectory_id: str
    source: int  # the replica that died
    length: int  # response tokens that it kept
    detected: float  # Unix time, s
    target: int | None = None  # the replica that took it up; None: none did, it was dropped or the run ended
    waited_s: float | None = None  # from detection until it was handed over


def handovers(run: Path) -> list[Handover]:
    """Handovers of a run, in the order in which the deaths were detected."""
    replica_of: dict[str, int] = {}
    found: list[Handover] = []
    waiting: dict[str, int] = {}  # trajectory -> its place in `found`
    with reading(run) as connection:
        rows = connection.execute(
            "SELECT wall, body FROM event WHERE kind IN ('assigned', 'interrupted') ORDER BY seq"
        )
        for wall, body in rows:
            event = decode_event(body)
            if isinstance(event, Interrupted) and event.reason == "replica_crashed":
                waiting[event.trajectory_id] = len(found)
                source = replica_of[event.trajectory_id]
                found.append(
                    Handover(trajectory_id=event.trajectory_id, source=source, length=event.length, detected=wall)
                )
            elif isinstance(event, Assigned):
                replica_of[event.trajectory_id] = event.replica
                place = waiting.pop(event.trajectory_id, None)
                if place is not None:
                    lost = found[place]
                    found[place] = replace(lost, target=event.replica, waited_s=wall - lost.detected)
    return found
