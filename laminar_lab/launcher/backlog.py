"""Runs that wait for a slot, and where each has failed. Pure; owned by the queue.

Invariant: a run is tried in at most two places, so that no bad GPU fails it and no bad run is tried for ever. No
place is ever closed: what fails in a bad one goes on elsewhere, before all that was not tried yet.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

from laminar_lab.launcher.experiment import PlannedRun

PLACES_TRIED = 2  # in which a run fails before that is its own fault


class Backlog:
    """Runs in the order of their turns; `places` are numbers, `held` counts runs that others have now."""

    def __init__(self, runs: Iterable[PlannedRun], *, places: Collection[int], held: int = 0) -> None:
        self._waiting = list(runs)
        self._places = set(places)
        self._in_hand = held
        self._failed_in: defaultdict[str, set[int]] = defaultdict(set)  # places, by run

    @property
    def is_over(self) -> bool:
        """True once no place will have a run any more."""
        return not self._in_hand and not self._waiting

    def release(self, run: PlannedRun) -> None:
        """A run that another process had is free, and the next to go on."""
        self._in_hand -= 1
        self._waiting.insert(0, run)

    def take(self, place: int) -> PlannedRun | None:
        """The next run for a place, if there is one; to be followed by `ended` or `failed`."""
        run = next((run for run in self._waiting if place not in self._failed_in[run.name]), None)
        if run is not None:
            self._waiting.remove(run)
            self._in_hand += 1
        return run

    def ended(self) -> None:
        """A run has ended, or was stopped."""
        self._in_hand -= 1

    def failed(self, run: PlannedRun, place: int) -> bool:
        """A run has used up its tries there. True if it is to be tried in another place."""
        self._in_hand -= 1
        tried = self._failed_in[run.name]
        tried.add(place)
        goes_on = len(tried) < min(PLACES_TRIED, len(self._places))
        if goes_on:
            self._waiting.insert(0, run)
        return goes_on
