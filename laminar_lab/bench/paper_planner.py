"""The planner of the Laminar paper, which `laminar bench repack` compares with the predictive planner."""

import math
from collections.abc import Sequence

from laminar_py.records.replica import Move, Survey
from laminar_py.repack import EngineSpeed, PlanningContext

MARGIN = 0.25  # the roofline batch lengthens a step by this share over a single sequence


class PaperPlanner:
    """Best-Fit consolidation of replicas that ramp down.

    A replica ramps down if nothing waits, its KV use fell since the last survey, and it decodes fewer than the
    roofline batch: `C_used < min(C_max, C_prev)` and `N < B` in the paper. The planner empties these candidates,
    the emptiest first. All trajectories of a candidate go to the candidate with the highest KV use that still has
    room by KV capacity and roofline batch. A candidate that received is no source.
    """

    def __init__(self, context: PlanningContext) -> None:
        self._previous_kv = context.previous_kv
        self._roofline_batch = roofline_batch(context.speed)

    def _ramps_down(self, survey: Survey) -> bool:
        """Whether a replica ramps down; False at its first survey."""
        limit = min(survey.kv_capacity, self._previous_kv.get(survey.replica, 0))
        return not survey.waiting and survey.kv_used < limit and len(survey.running) < self._most(survey)

    def _most(self, survey: Survey) -> float:
        """Return the roofline batch of a replica, at most its slots."""
        return min(survey.slots, self._roofline_batch)

    def plan(self, surveys: Sequence[Survey]) -> list[Move]:
        """Return moves among the replicas in `surveys`, which serve the same version."""
        candidates = [
            survey for survey in surveys if survey.can_move and survey.running and self._ramps_down(survey)
        ]
        candidates.sort(key=lambda survey: (survey.kv_used, survey.replica))
        used = {survey.replica: survey.kv_used for survey in candidates}
        count = {survey.replica: len(survey.running) for survey in candidates}
        received: set[int] = set()
        moves: list[Move] = []
        for source in candidates:
            if source.replica in received:
                continue
            fitting = [
                survey
                for survey in candidates
                if survey is not source
                and count[survey.replica]
                and used[survey.replica] + source.kv_used <= survey.kv_capacity
                and count[survey.replica] + len(source.running) <= self._most(survey)
            ]
            if not fitting:
                continue
            best = max(fitting, key=lambda survey: used[survey.replica]).replica
            used[best] += source.kv_used
            count[best] += len(source.running)
            count[source.replica] = 0
            received.add(best)
            moves += [Move(held.trajectory_id, source.replica, best, held.context) for held in source.running]
        return moves


def roofline_batch(speed: EngineSpeed) -> float:
    """Return the decode batch up to which a larger batch costs the engine little time; inf without a limit."""
    each_s = speed.step_s_per_sequence
    return math.inf if each_s == 0 else 1 + int(MARGIN * speed.step_s / each_s)
