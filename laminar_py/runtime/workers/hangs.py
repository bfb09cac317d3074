"""Finds a rank of the learner that hangs in silence, from the positions of all ranks. Pure; times are arguments.

`LearnerKeeper` asks each rank for its position while the ranks step or publish. All ranks enter the same
collectives, so a rank that has entered fewer than another keeps that rank waiting. A rank hangs in two cases:

- it has entered the fewest, and for the limit of its activity it has begun no other and entered no collective;
- all ranks have entered the same number, and each stands still beyond its limit: nothing leaves the collective.

A rank that computes has a long limit (`learner.distributed.COMPUTES_S`), which restarts with each microbatch
(`tests/workers/test_hangs.py`).
"""

from laminar_py.records.metrics import RankPosition


class HangWatch:
    """Newest position of each rank, e.g. `HangWatch(2)` for two ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._positions: dict[int, RankPosition] = {}
        self._since: dict[int, float] = {}  # time at which a rank was first seen in its position

    def restart(self, now: float) -> None:
        """Begin to watch a call: the ranks may have stood still between calls."""
        self._since = dict.fromkeys(self._since, now)

    def note(self, rank: int, position: RankPosition, *, now: float) -> None:
        """Take a rank's position, which it gave at the time `now`."""
        if self._positions.get(rank) != position:
            self._positions[rank], self._since[rank] = position, now

    def find_hung(self, now: float) -> tuple[int, str] | None:
        """Return a rank that hangs, with the reason; None while all ranks move or may stand still."""
        positions = self._positions
        if len(positions) < self._num_ranks or len(positions) == 1:
            return None
        rank = min(positions, key=lambda one: (positions[one].collectives, self._since[one]))
        least = positions[rank].collectives
        num_waiting = sum(position.collectives > least for position in positions.values())
        if any(not self._stands(one, now) for one in ([rank] if num_waiting else positions)):
            return None
        stands = f"has stood still for {now - self._since[rank]:.0f} s"
        if not num_waiting:
            return rank, f"hangs: it {stands}, like all ranks, after collective {least:,}"
        others = "another rank waits" if num_waiting == 1 else f"{num_waiting} other ranks wait"
        return rank, f"hangs: it {stands}, and {others} for it in collective {least + 1:,}"

    def last_activity(self, rank: int) -> str:
        """Return the activity in which a rank was last seen; "" if it has given no position yet."""
        return self._positions[rank].activity if rank in self._positions else ""

    def _stands(self, rank: int, now: float) -> bool:
        return now - self._since[rank] > self._positions[rank].limit_s
