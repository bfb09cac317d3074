"""Runs that wait for a slot, and what failures say about a run or about a slot. Pure; owned by the queue.

Invariants: a run is tried in at most two slots, so that neither a bad GPU fails all runs nor a bad run stops all
slots; a slot where two runs failed that have not failed elsewhere gets no more.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

from laminar_py.launcher.experiment import PlannedRun

SLOTS_TRIED = 2  # in which a run fails before that is its own fault
MOST_BLAME = 2  # runs that failed in a slot, and nowhere else, before that is the slot's fault


class Backlog:
    """Runs in the order of their turns; `slots` are indices, `held` counts runs that others have now."""

    def __init__(self, runs: Iterable[PlannedRun], *, slots: Collection[int], held: int = 0) -> None:
        self._waiting = list(runs)
        self._slots = set(slots)
        self._in_hand = held
        self._failed_in: defaultdict[str, set[int]] = defaultdict(set)  # slots, by run
        self._blamed_by: defaultdict[int, set[str]] = defaultdict(set)  # runs, by slot

    @property
    def is_over(self) -> bool:
        """True once no slot will have a run any more; those that wait then are left."""
        return not self._in_hand and not any(self._first_for(slot) for slot in self._slots)

    def is_open(self, slot: int) -> bool:
        """True while the slot gets runs; the only one always does, since nothing tells it from its runs."""
        return len(self._blamed_by[slot]) < MOST_BLAME or len(self._slots) == 1

    def release(self, run: PlannedRun) -> None:
        """A run that another process had is free, and the next to go on."""
        self._in_hand -= 1
        self._waiting.insert(0, run)

    def take(self, slot: int) -> PlannedRun | None:
        """The next run for a slot, if there is one; to be followed by `ended` or `failed`."""
        run = self._first_for(slot)
        if run is not None:
            self._waiting.remove(run)
            self._in_hand += 1
        return run

    def ended(self, slot: int) -> None:
        """A run has ended there, or was stopped: the slot works."""
        self._in_hand -= 1
        self._blamed_by[slot].clear()

    def failed(self, run: PlannedRun, slot: int) -> bool:
        """A run has used up its tries there. True if it is to be tried in another slot."""
        self._in_hand -= 1
        slots = self._failed_in[run.name]
        slots.add(slot)
        self._blamed_by[slot].add(run.name)
        if len(slots) >= SLOTS_TRIED:
            for one in slots:
                self._blamed_by[one].discard(run.name)
            return False
        elsewhere = any(self.is_open(other) for other in self._slots - slots)
        if elsewhere:
            self._waiting.insert(0, run)
        return elsewhere

    def _first_for(self, slot: int) -> PlannedRun | None:
        fitting = (run for run in self._waiting if slot not in self._failed_in[run.name])
        return next(fitting, None) if self.is_open(slot) else None
