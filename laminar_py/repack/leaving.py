"""Plan for replicas that leave: what they have moves to others that have room for it. Pure.

Called by the owner of the fleet, again and again until they have nothing. Invariant: no destination is given more
than it has room for, by all that leave together, so what finds no room stays where it runs, and ends there.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heapreplace

from laminar_py.records.replica import Move, Survey


def plan_leaving(
    surveys: Sequence[Survey], *, room: Mapping[int, int], is_moving: Callable[[str], bool]
) -> list[Move]:
    """Moves of the trajectories of leaving replicas to others, each of which has `room` for so many more.

    What is moving already is left alone. What has not begun goes first, then what costs the least prefill; each
    goes where the most room is.
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
