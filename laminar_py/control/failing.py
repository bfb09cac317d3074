"""Trajectories that failed one after another: requests that no engine takes, environments that cannot go on.

Owned by `control.reports`. A few failures cost their trajectories alone. Where nothing else comes, none will: the
run ends, at once if no trajectory ever finished, else after a while, in which what they need may come back.
"""

from collections.abc import Callable

from laminar_py.records.protocols import Clock
from laminar_py.records.trajectory import DropReason

FEWEST = 32  # trajectories from which anything is concluded
OUTAGE_S = 600.0  # that a service which environments need may be down


class Failing:
    """Failures since the last trajectory that finished; `end` is told why the run has to end.

    `step` trajectories make a learner step, and as many as `in_flight` says may still finish.
    """

    def __init__(
        self, *, step: int, in_flight: Callable[[], int], clock: Clock, end: Callable[[str], None]
    ) -> None:
        self._most = max(FEWEST, step)
        self._in_flight = in_flight
        self._clock = clock
        self._end = end
        self._count = 0
        self._since_s = 0.0
        self._any_finished = False

    def finished(self) -> None:
        """Begin to count anew."""
        self._count, self._any_finished = 0, True

    def failed(self, reason: DropReason, detail: str) -> None:
        """Count one; ends the run where there are too many."""
        now_s = self._clock.now()
        if not self._count:
            self._since_s = now_s
        self._count += 1
        waits = self._any_finished and now_s - self._since_s < OUTAGE_S
        if self._count >= max(self._most, self._in_flight()) and not waits:
            self._end(
                f"{self._count} trajectories in a row failed ({reason}), the last: {detail}; mend it and go on"
                " with --resume"
            )
