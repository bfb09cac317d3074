"""Plan for a replica that leaves: what it has moves to others of its version that have a slot free. Pure.

Called by the owner of the fleet, again and again until the replica has nothing. Invariant: no destination is given
more than it decodes at once, so what finds no slot stays where it runs, and ends there.
"""

from collections.abc import Mapping

from laminar_py.records.replica import Move, Survey


def plan_leaving(survey: Survey, *, in_flight: Mapping[int, int]) -> list[Move]:
    """Moves of a leaving replica's trajectories to replicas of its version, by what these have in flight.

    What has not begun goes first, then what costs the least prefill; each goes where the most slots are free.
    """
    free = {replica: survey.slots - count for replica, count in in_flight.items()}
    waiting = [(held, 0) for held in survey.waiting]
    running = [(held, held.context) for held in sorted(survey.running, key=lambda held: held.context)]
    moves = []
    for held, prefill in (*waiting, *running):
        destination = max(free, key=lambda replica: (free[replica], -replica), default=None)
        if destination is None or free[destination] <= 0:
            break
        free[destination] -= 1
        moves.append(Move(held.trajectory_id, survey.replica, destination, prefill))
    return moves
