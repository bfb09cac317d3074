"""The planner of the Laminar paper (its dynamic repack algorithm): Best-Fit consolidation."""

from collections.abc import Sequence

from laminar_py.records.replica import Move, Survey
from laminar_py.repack.planner import PlanningContext, move_of
from laminar_py.repack.signals import RampDown


class PaperPlanner:
    """Best-Fit consolidation of replicas that ramp down.

    The planner empties candidates, the emptiest first. All trajectories of a candidate go to the candidate with
    the highest KV use that still has room by KV capacity and roofline batch. A candidate that received is no
    source.
    """

    def __init__(self, context: PlanningContext) -> None:
        self._ramp_down = RampDown(context.previous_kv, context.speed.roofline_batch)

    def plan(self, group: Sequence[Survey]) -> list[Move]:
        """Return moves among replicas that serve the same version."""
        candidates = [s for s in group if s.settled and s.running and self._ramp_down.is_idle(s)]
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
                and count[survey.replica] + len(source.running) <= self._ramp_down.roofline_batch
            ]
            if not fitting:
                continue
            best = max(fitting, key=lambda survey: used[survey.replica]).replica
            used[best] += source.kv_used
            count[best] += len(source.running)
            count[source.replica] = 0
            received.add(best)
            moves += [move_of(held, source, best) for held in source.running]
        return moves
