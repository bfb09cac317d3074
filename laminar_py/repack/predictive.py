"""The predictive planner: it shares waiting trajectories, and empties replicas if that gains time."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np

from laminar_py.records.replica import Move, Survey, TrajectorySummary
from laminar_py.repack.planner import PlanningContext, move_of

CACHE_READS = 2.5  # most time in a destination's step for reading KV caches, over the time for reading the weights


class PredictivePlanner:
    """Shares waiting trajectories, then empties replicas if that gains time.

    1. Waiting trajectories move from replicas with a queue to replicas with room; these have no KV cache to lose.
    2. Of the replicas that have no queue and received nothing, the planner empties as many as the others have room
       for in this round, the emptiest first, and spreads their trajectories evenly. A destination has room until
       reading KV caches takes `CACHE_READS` times as long as reading weights; more would slow down its batch for
       little gain. Emptying a replica gains the time until its longest response would end. It costs prefill and
       slower steps at the destinations. The planner empties a replica if the gain exceeds the cost, or if the
       replica has kept its version longer than `hold_s` while all its trajectories wait for environments. Without
       new prompts for emptied replicas (`has_demand`) it empties none.
    """

    def __init__(self, context: PlanningContext) -> None:
        self._speed = context.speed
        self._forecast = context.forecast
        self._stall_tokens = int(context.max_stall_s * context.speed.prefill_tokens_per_s)
        self._growth = context.growth
        self._hold_s = context.hold_s
        self._has_demand = context.has_demand

    def plan(self, surveys: Sequence[Survey]) -> list[Move]:
        """Return moves among the replicas in `surveys`, which serve the same version."""
        movable = [survey for survey in surveys if survey.can_move]
        queues = {
            survey.replica: [held for held in survey.waiting if not held.length]
            for survey in movable
            if survey.waiting
        }
        takers = [survey for survey in movable if survey.running and not survey.waiting]
        shared, filled = self._share(queues, takers)
        tail = [survey for survey in takers if survey.replica not in filled]
        return shared + (self._consolidate(tail) if self._has_demand else [])

    # ---- waiting trajectories

    def _share(
        self, queues: dict[int, list[TrajectorySummary]], takers: Sequence[Survey]
    ) -> tuple[list[Move], set[int]]:
        """Return moves that fill the `takers` from the longest of the queues, and the replicas that receive any.

        `queues` has the waiting trajectories without tokens by replica; moved trajectories are removed from it.
        """
        moves: list[Move] = []
        filled: set[int] = set()
        growth = 0.0
        if queues:  # half of the expected response, its mean KV use over time
            growth = float(self._forecast([queue[-1] for queue in queues.values() if queue][:1]).sum()) / 2
        for taker in sorted(takers, key=lambda survey: survey.kv_used):
            slots, room = taker.slots - len(taker.running), taker.kv_capacity - taker.kv_used
            while queues:
                donor = max(queues, key=lambda replica: len(queues[replica]))
                queue = queues[donor]
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

    # ---- running trajectories

    def _consolidate(self, tail: Sequence[Survey]) -> list[Move]:
        """Return moves that empty replicas of `tail`, if that gains time and their trajectories fit elsewhere.

        A replica moves all its running trajectories or none.
        """
        ordered = sorted(tail, key=lambda survey: (survey.kv_used, survey.replica))
        if len(ordered) < 2:
            return []
        gains = self._gains(ordered)
        first = next((index for index, gain in enumerate(gains) if gain > 0), len(ordered))
        ordered, gains = ordered[first:], gains[first:]  # the replicas before `first` become empty soon anyway
        free = {survey.replica: self._free(survey) for survey in ordered}
        sources = self._sources(ordered, gains, free)
        emptied = {survey.replica for survey in sources}
        others = [survey for survey in ordered if survey.replica not in emptied]
        rooms = _DestinationHeap(others, [free[survey.replica] for survey in others], self._stall_tokens)
        moves: list[Move] = []
        for source in sources:
            before = rooms.copy()
            given = self._spread(source, rooms)
            if given is None:
                rooms = before  # a source moves whole or not at all
            else:
                moves += given
        return moves

    def _free(self, survey: Survey) -> int:
        """Return the KV tokens for which a destination has room, by its capacity and by `CACHE_READS`."""
        speed = self._speed
        limit = float(survey.kv_capacity)
        if speed.step_s_per_token > 0:
            limit = min(limit, CACHE_READS * speed.step_s / speed.step_s_per_token)
        return max(0, int(limit) - survey.kv_used)

    def _sources(self, ordered: Sequence[Survey], gains: Sequence[float], free: Mapping[int, int]) -> list[Survey]:
        """Return the emptiest replicas that gain, as many as the others have room for in this round.

        `gains` has each replica's gain in seconds, `free` its room in KV tokens. A replica whose longest response
        fits nowhere else is skipped, since that response would keep the replica busy just as long.
        """
        room = {replica: min(tokens, self._stall_tokens) for replica, tokens in free.items()}
        widest = sorted(room.values())[-2:]
        left = sum(room.values())
        slots = sum(survey.slots - len(survey.running) for survey in ordered)
        sources: list[Survey] = []
        for source, gain in zip(ordered, gains, strict=True):
            longest = max(held.context for held in source.running) + self._growth
            if longest > (widest[-1] if room[source.replica] < widest[-1] else widest[0]):
                continue
            left -= room[source.replica] + source.kv_used + self._growth * len(source.running)
            slots -= source.slots
            if gain <= 0 or left < 0 or slots < 0:
                break
            sources.append(source)
        return sources

    def _spread(self, source: Survey, rooms: "_DestinationHeap") -> list[Move] | None:
        """Return moves for all trajectories on a source, longest first; None if a trajectory fits nowhere."""
        moves: list[Move] = []
        for held in sorted(source.running, key=lambda held: -held.context):
            destination = rooms.place(held.context + self._growth)
            if destination is None:
                return None
            moves.append(move_of(held, source, destination))
        return moves

    def _gains(self, tail: Sequence[Survey]) -> list[float]:
        """Return [n] the replica seconds that emptying each replica of `tail` would gain, costs subtracted.

        A replica gains the time until its longest response would end. The costs are the time that a full replica
        takes for the same tokens, their prefill, and the slowdown of the batches that they join. A replica whose
        responses all wait for environments longer than `hold_s` has an infinite gain.
        """
        counts = np.array([len(survey.running) for survey in tail])
        running = [response for survey in tail for response in survey.running]
        contexts = np.array([response.context for response in running], np.float64)
        remaining = self._forecast(running)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        speed, mean_context = self._speed, float(contexts.mean())
        full = max(1, min(tail[0].slots, int(tail[0].kv_capacity / mean_context)))
        best = speed.rate(sequences=full, kv_tokens=full * mean_context)
        slower_s = speed.step_s_per_sequence + speed.step_s_per_token * contexts
        costs_s = np.add.reduceat(remaining * (1 / best + slower_s) + speed.prefill_s(1) * contexts, starts)
        # n responses of equal hazard end one by one: k of them run together for mean / k steps
        harmonic = np.cumsum(1 / np.arange(1, counts.max() + 1))[counts - 1]  # [n] 1 + 1/2 + ... + 1/count
        steps_s = (
            speed.step_s * harmonic
            + speed.step_s_per_sequence * counts
            + speed.step_s_per_token * np.add.reduceat(contexts, starts)
        )
        alone_s = np.add.reduceat(remaining, starts) / counts * steps_s
        is_held = np.array([survey.held_s > self._hold_s for survey in tail])
        gains: list[float] = np.where(is_held, np.inf, alone_s - costs_s).tolist()
        return gains


class _DestinationHeap:
    """Destination replicas; the replica that may receive the most KV tokens in this round comes first."""

    def __init__(self, surveys: Sequence[Survey], free: Sequence[int], stall_tokens: int) -> None:
        # a heap of (-KV tokens that the replica may still receive, -free KV tokens, replica, free slots)
        self._entries = [
            (-min(tokens, stall_tokens), -tokens, survey.replica, survey.slots - len(survey.running))
            for survey, tokens in zip(surveys, free, strict=True)
            if len(survey.running) < survey.slots
        ]
        heapify(self._entries)

    def copy(self) -> "_DestinationHeap":
        """Return a copy that later changes of this heap leave as it is."""
        other = _DestinationHeap((), (), 0)
        other._entries = self._entries.copy()
        return other

    def place(self, context: int) -> int | None:
        """Take `context` KV tokens and a slot at the replica with the most room; return the replica, or None."""
        if not self._entries or context > -self._entries[0][0]:
            return None
        left, free, replica, slots = self._entries[0]
        if slots > 1:
            heapreplace(self._entries, (left + context, free + context, replica, slots - 1))
        else:
            heappop(self._entries)
        return replica
