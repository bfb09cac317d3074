"""The predictive planner: it shares waiting trajectories, and empties replicas if that gains time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from laminar_py.records.replica import Move, Survey, TrajectorySummary
from laminar_py.repack.planner import PlanningContext

CACHE_READS = 2.5  # most time in a destination's step for reading KV caches, over the time for reading the weights
EVICTIONS = 2.0  # evicted tokens for each token above the cache, since an LRU cache evicts the next to return
AWAY_PRIOR = 8.0  # responses in engines, added to the counts by which the time of waits is estimated


class PredictivePlanner:
    """Shares waiting trajectories, then empties replicas if that gains time.

    1. Waiting trajectories move from replicas with a queue to replicas with room; these have no KV cache to lose.
    2. Of the replicas that have no queue and received nothing, the planner empties as many as the others have room
       for in this round, the emptiest first, and spreads their trajectories evenly. A destination has room until
       reading KV caches takes `CACHE_READS` times as long as reading weights; more would slow down its batch for
       little gain. The planner empties a replica if the gained time exceeds the work at the destinations
       (`_price`), or if the replica has kept its version longer than `hold_s` while all its trajectories wait
       for environments. Without new prompts for emptied replicas (`has_demand`) it empties none.
    """

    def __init__(self, context: PlanningContext) -> None:
        self._speed = context.speed
        self._stall_tokens = int(context.max_stall_s * context.speed.prefill_tokens_per_s)
        self._context = context

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
        return shared + (self._consolidate(tail) if self._context.has_demand else [])

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
        if queues:  # half of the expected response, its mean KV use over time; all of it where turns return to it
            expected = self._context.forecast([queue[-1] for queue in queues.values() if queue][:1]).sum()
            growth = float(expected) * (1.0 if any(map(_has_turns, takers)) else 0.5)
        for taker in sorted(takers, key=lambda survey: survey.kv_used):
            slots, room = taker.slots - len(taker.running), taker.kv_capacity - self._claimed(taker)
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
        if len(tail) < 2:
            return []
        ordered = self._price(sorted(tail, key=lambda survey: (self._claimed(survey), survey.replica)))
        first = next((index for index, source in enumerate(ordered) if source.gain_s > 0), len(ordered))
        ordered = ordered[first:]  # the replicas before `first` become empty soon anyway
        free = {source.survey.replica: self._free(source.survey) for source in ordered}
        sources = self._sources(ordered, free)
        emptied = {source.survey.replica for source in sources}
        rooms = []
        for other in ordered:
            replica, slots = other.survey.replica, other.survey.slots - len(other.survey.running)
            if replica not in emptied and slots > 0:
                excess = other.peak - other.survey.kv_capacity
                room = min(free[replica], self._stall_tokens)
                rooms.append((max(0, excess), -room, -free[replica], replica, slots, excess))
        heapify(rooms)
        return [move for source in sources for move in self._spread(source, rooms)]

    def _claimed(self, survey: Survey) -> int:
        """Return the KV tokens that a replica's responses use now, or will need by the ends of their turns."""
        if not _has_turns(survey):
            return survey.kv_used
        held = sum(response.context for response in survey.running)
        return held + int(self._context.forecast(survey.running).sum())

    def _free(self, survey: Survey) -> int:
        """Return the KV tokens for which a destination has room, by its capacity and by `CACHE_READS`."""
        speed, limit = self._speed, survey.kv_capacity
        if speed.step_s_per_token > 0:
            limit = min(limit, int(CACHE_READS * speed.step_s / speed.step_s_per_token))
        return max(0, limit - survey.kv_used)

    def _sources(self, ordered: Sequence["_PricedReplica"], free: Mapping[int, int]) -> list["_PricedReplica"]:
        """Return the emptiest replicas that gain, as many as the others have room for in this round.

        `free` has each replica's room in KV tokens now, `spare` its room at its responses' ends. A replica whose
        longest response fits nowhere else is skipped, since it would stay as busy. Responses that outgrow the
        other replicas' caches have parts of their caches evicted, and computed again, at every turn to come.
        """
        room = {replica: min(tokens, self._stall_tokens) for replica, tokens in free.items()}
        widest = sorted(room.values())[-2:]
        left = sum(room.values())
        slots = sum(source.survey.slots - len(source.survey.running) for source in ordered)
        spare = {source.survey.replica: max(0, source.survey.kv_capacity - source.peak) for source in ordered}
        unclaimed = sum(spare.values())
        emptied: list[_PricedReplica] = []
        for source in ordered:
            survey = source.survey
            longest = max(held.context for held in survey.running) + self._context.growth
            if longest > (widest[-1] if room[survey.replica] < widest[-1] else widest[0]):
                continue
            left -= room[survey.replica] + source.held + self._context.growth * len(survey.running)
            slots -= survey.slots
            unclaimed -= spare[survey.replica] + source.peak
            evicted = min(1.0, max(0.0, -EVICTIONS * unclaimed / max(1, source.peak)))
            if source.gain_s <= evicted * source.again_s or left < 0 or slots < 0:
                break
            emptied.append(source)
        return emptied

    def _spread(self, source: "_PricedReplica", rooms: list[tuple[int, int, int, int, int, int]]) -> list[Move]:
        """Return moves for all trajectories on a source, longest first; none if a trajectory fits nowhere.

        `rooms` is a heap of destinations, whose room the moves take: (KV tokens at its responses' ends above its
        cache, or 0; -KV tokens that it may still receive; -free KV tokens; replica; free slots; excess or room).
        """
        moves, left = list[Move](), rooms.copy()
        for held in sorted(source.survey.running, key=lambda held: -held.context):
            context = held.context + self._context.growth
            if not left or context > -left[0][1]:
                return []
            _, room, free, replica, slots, excess = heappop(left)
            if slots > 1:
                excess += held.context * source.peak // source.held
                heappush(left, (max(0, excess), room + context, free + context, replica, slots - 1, excess))
            moves.append(Move(held.trajectory_id, source.survey.replica, replica, held.context))
        rooms[:] = left
        return moves

    def _price(self, tail: Sequence[Survey]) -> list["_PricedReplica"]:
        """Return the gains and costs of emptying each replica of `tail`, in seconds of a replica.

        The price of a response with `context` tokens now, which has `decoded` and `read` tokens of model and
        environment and `turns` answers to come, is

            decoded * (1 / best + slower) + read * prefill + context * prefill + later * prefill * turns * evicted

        `best` is the rate of a full replica, `slower` the delay of the batch that the response joins, `prefill`
        the seconds for a token, `later` its mean context from now on, and `evicted` is known to `_sources`. The
        gain is the time until the replica's longest response would end, with waits for environments. It is
        infinite where all responses have waited for environments longer than `hold_s`.
        """
        counts = np.array([len(survey.running) for survey in tail])
        running = [response for survey in tail for response in survey.running]
        contexts = np.array([response.context for response in running], np.float64)
        remaining = self._context.forecast(running)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        length = max(1, sum(response.length for response in running))
        read = remaining * (sum(response.observed for response in running) / length)
        speed, mean_context = self._speed, float(contexts.mean())
        full = max(1, min(tail[0].slots, int(tail[0].kv_capacity / mean_context)))
        best = speed.rate(sequences=full, kv_tokens=full * mean_context)
        slower_s = speed.step_s_per_sequence + speed.step_s_per_token * contexts
        work_s = (remaining - read) * (1 / best + slower_s) + speed.prefill_s(1) * (read + contexts)
        turns = remaining * (sum(response.turns for response in running) / length)
        again_s = speed.prefill_s(1) * (contexts + remaining / 2) * turns
        # n responses of equal hazard end one by one: k of them run together for mean / k steps
        harmonic = np.cumsum(1 / np.arange(1, counts.max() + 1))[counts - 1]  # [n] 1 + 1/2 + ... + 1/count
        held, to_come, reads, costs_s, agains_s = np.add.reduceat(
            [contexts, remaining, read, work_s, again_s], starts, axis=1
        )
        steps_s = speed.step_s * harmonic + speed.step_s_per_sequence * counts + speed.step_s_per_token * held
        alone_s = (to_come - reads) / counts * steps_s + speed.prefill_s(1) * reads
        alone_s *= (AWAY_PRIOR + len(running)) / (AWAY_PRIOR + sum(not response.is_away for response in running))
        gains_s = np.where([one.held_s > self._context.hold_s for one in tail], np.inf, alone_s - costs_s)
        return [
            _PricedReplica(
                survey=survey,
                held=int(held[place]),
                peak=self._claimed(survey),
                gain_s=float(gains_s[place]),
                again_s=float(agains_s[place]),
            )
            for place, survey in enumerate(tail)
        ]


def _has_turns(survey: Survey) -> bool:
    """Whether environments answer turns of the responses on a replica."""
    return any(response.turns or response.is_away for response in survey.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PricedReplica:
    """A replica that a round may empty, with its price in seconds of a replica, see `PredictivePlanner._price`."""

    survey: Survey
    held: int  # KV tokens of its responses, with responses that wait for environments
    peak: int  # KV tokens of its responses at their ends
    gain_s: float  # time that it gains, less the work at destinations that evict nothing
    again_s: float  # prefill at destinations that have evicted all its caches by each turn to come
