"""Plan for leaving replicas: their trajectories move to replicas with room. Pure.

The owner of the fleet calls it until the leaving replicas have no trajectories. All leaving replicas together give
a destination no more than its room; a trajectory without a destination finishes where it runs
(`tests/repack/test_leaving.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heapreplace

from laminar_py.records.replica import Move, Survey


def plan_leaving(
    surveys: Sequence[Survey], *, room: Mapping[int, int], is_moving: Callable[[str], bool]
) -> list[Move]:
    """Return moves from the leaving replicas in `surveys` to replicas that have `room[replica]` free places.

    Trajectories that `is_moving` stay out. Waiting trajectories move first, then those with the shortest prefill;
    each goes to the replica with the most room.
    """
    most = [(-free, replica) for replica, free in room.items() if free > 0]
    heapify(most)
    waiting = [(held, survey.replica, 0) for survey in surveys for held in survey.waiting]
    running = [(held, survey.replica, held.context) for survey in surveys for held in survey.running]
    running.sort(key=lambda item: item[0].context)
    moves = []
    for held, source, prefill in (*waiting, *running):
        if is_moving(held.trajectory_id):
            continue
        if not most or most[0][0] == 0:
            break
        free, destination = most[0]
        heapreplace(most, (free + 1, destination))
        moves.append(Move(held.trajectory_id, source, destination, prefill))
    return moves
