"""The predictive planner: waiting trajectories are shared, and replicas are emptied where that gains time."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from laminar_py.records.replica import Held, Move, Survey
from laminar_py.repack.planner import PlanningContext, move_of
from laminar_py.repack.signals import Numbers


class PredictivePlanner:
    """Shares what waits, then empties sources into several destinations where that gains.

    1. Where one replica of a version has trajectories that wait and another has room, waiting ones move: they have
       no KV cache to lose.
    2. Where nothing waits any more, sources, the emptiest first, are emptied into the fullest destinations that
       have room, over several rounds if the stall limit says so, if that gains more time than it costs: a source
       is freed for as long as its longest response is expected to go on; destinations stand still for prefill
       and are slower afterwards. Not where a freed replica would get nothing (`has_demand` is False).
    """

    def __init__(self, context: PlanningContext) -> None:
        self._speed = context.speed
        self._to_come = context.forecast
        self._stall_tokens = int(context.max_stall_s * context.speed.prefill_tokens_per_s)
        self._growth = context.growth
        self._has_demand = context.has_demand

    def plan(self, group: Sequence[Survey]) -> list[Move]:
        """Moves among replicas that serve the same version."""
        settled = [survey for survey in group if survey.settled]
        donors = {survey.replica: _fresh(survey) for survey in settled if survey.waiting}
        takers = [survey for survey in settled if survey.running and not survey.waiting]
        shared, filled = self._share(donors, takers)
        tail = [survey for survey in takers if survey.replica not in filled]
        return shared + (self._consolidate(tail) if self._has_demand else [])

    # ---- what waits

    def _share(self, donors: dict[int, list[Held]], takers: Sequence[Survey]) -> tuple[list[Move], set[int]]:
        """Moves of waiting trajectories, from the longest queue first, to replicas with room; and who got any."""
        moves: list[Move] = []
        filled: set[int] = set()
        growth = 0.0
        if donors:  # what a new one has on average over its life
            growth = float(self._to_come([queue[-1] for queue in donors.values() if queue][:1]).sum()) / 2
        for taker in sorted(takers, key=lambda survey: survey.kv_used):
            slots, room = taker.slots - len(taker.running), taker.kv_capacity - taker.kv_used
            while donors:
                donor = max(donors, key=lambda replica: len(donors[replica]))
                queue = donors[donor]
                if not queue:
                    break
                footprint = queue[-1].context + growth
                count = min(slots, int(room / footprint), len(queue))
                if count <= 0:
                    break
                given = queue[-count:]  # the last ones: members of one group stay together
                del queue[-count:]
                moves += [Move(held.trajectory_id, donor, taker.replica, 0) for held in given]
                filled.add(taker.replica)
                slots, room = slots - count, room - int(count * footprint)
        return moves, filled

    # ---- what runs

    def _consolidate(self, tail: Sequence[Survey]) -> list[Move]:
        ordered = sorted(tail, key=lambda survey: (survey.kv_used, survey.replica))
        if len(ordered) < 2:
            return []
        rooms = _Rooms(ordered, self._stall_tokens, self._growth)
        gains = self._gains(ordered)
        moves: list[Move] = []
        for source, gain in zip(ordered, gains, strict=True):
            if gain <= 0 or rooms.received(source.replica):
                continue
            rooms.leave(source.replica)
            if not rooms.hold(source):
                rooms.come_back(source.replica)
                continue
            for held in sorted(source.running, key=lambda held: -held.context):
                destination = rooms.place(held.context + self._growth)
                if destination is not None:
                    moves.append(move_of(held, source, destination))
        return moves

    def _gains(self, tail: Sequence[Survey]) -> list[float]:
        """Seconds of a full replica that emptying each would gain.

        Alone it would stand there until its longest response ends. Elsewhere its tokens take the time that a full
        replica takes for as many, the prefill, and what they slow down the others in their batches by.
        """
        counts = np.array([len(survey.running) for survey in tail])
        running = [held for survey in tail for held in survey.running]
        contexts = np.array([held.context for held in running], np.float64)
        to_come = self._to_come(running)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        speed, mean_context = self._speed, float(contexts.mean())
        full = max(1, min(tail[0].slots, int(tail[0].kv_capacity / mean_context)))
        best = speed.rate(sequences=full, kv_tokens=full * mean_context)
        slower_s = speed.step_s_per_sequence + speed.step_s_per_token * contexts
        costs_s = np.add.reduceat(to_come * (1 / best + slower_s) + speed.prefill_s(1) * contexts, starts)
        # n with equal hazards end one after another: the k-th last one after mean / k steps of k
        steps_s = (
            speed.step_s * _harmonic(counts)
            + speed.step_s_per_sequence * counts
            + speed.step_s_per_token * np.add.reduceat(contexts, starts)
        )
        alone_s = np.add.reduceat(to_come, starts) / counts * steps_s
        gains: list[float] = (alone_s - costs_s).tolist()
        return gains


class _Rooms:
    """Destinations by what they can still take in this round, the least first (Best-Fit).

    Each entry is (tokens this round, free KV, replica); tokens this round are bounded by the free KV and by what
    the stall limit leaves.
    """

    def __init__(self, surveys: Sequence[Survey], stall_tokens: int, growth: int) -> None:
        self._stall_tokens = stall_tokens
        self._growth = growth
        self._slots = {survey.replica: survey.slots - len(survey.running) for survey in surveys}
        self._entries: list[tuple[int, int, int]] = []
        self._entry: dict[int, tuple[int, int, int]] = {}
        self._received: set[int] = set()
        self._free_kv = self._free_slots = 0
        for survey in surveys:
            free = survey.kv_capacity - survey.kv_used
            self._add((min(free, stall_tokens), free, survey.replica))

    def received(self, replica: int) -> bool:
        """True where anything was placed there."""
        return replica in self._received

    def leave(self, replica: int) -> None:
        """Take a replica out: as a source it receives nothing."""
        self._remove(self._entry[replica])

    def come_back(self, replica: int) -> None:
        """Put a replica back, which is no source after all."""
        self._add(self._entry[replica])

    def hold(self, source: Survey) -> bool:
        """True where the others together have room for all of a source, in this round or later ones.

        A trajectory that no destination can ever take would stay behind, alone.
        """
        longest = max(held.context for held in source.running) + self._growth
        widest = max((entry[1] for entry in self._entries), default=0)
        fits = longest <= min(self._stall_tokens, widest)
        return fits and source.kv_used <= self._free_kv and len(source.running) <= self._free_slots

    def place(self, context: int) -> int | None:
        """The destination with the least room that suffices, None if there is none in this round."""
        place = bisect_left(self._entries, (context,))
        if place == len(self._entries):
            return None
        entry = self._entries[place]
        replica = entry[2]
        self._remove(entry)
        self._slots[replica] -= 1
        self._add((entry[0] - context, entry[1] - context, replica))
        self._received.add(replica)
        return replica

    def _add(self, entry: tuple[int, int, int]) -> None:
        """Put in a replica, unless it has no slot or no token free."""
        self._entry[entry[2]] = entry
        if self._slots[entry[2]] > 0 and entry[1] > 0:
            self._free_kv += entry[1]
            self._free_slots += self._slots[entry[2]]
            insort(self._entries, entry)

    def _remove(self, entry: tuple[int, int, int]) -> None:
        if self._slots[entry[2]] > 0 and entry[1] > 0:
            self._free_kv -= entry[1]
            self._free_slots -= self._slots[entry[2]]
            del self._entries[bisect_left(self._entries, entry)]


def _harmonic(counts: npt.NDArray[np.int64]) -> Numbers:
    """[n] 1 + 1/2 + ... + 1/count."""
    out: Numbers = np.cumsum(1 / np.arange(1, counts.max() + 1))[counts - 1]
    return out


def _fresh(survey: Survey) -> list[Held]:
    """Waiting trajectories that have not begun anywhere."""
    return [held for held in survey.waiting if not held.length]
