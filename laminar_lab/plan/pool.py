"""Judgements made side by side, each in a process of its own. Called by `laminar plan`."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from laminar_lab.plan.judge import Judgement, judge
from laminar_lab.plan.placements import FleetPlacement
from laminar_lab.plan.request import PlanRequest

MOST = 8  # processes


def judged_side_by_side(request: PlanRequest) -> Callable[[Sequence[FleetPlacement], int], list[Judgement]]:
    """The judge of placements of a request, on all cores."""

    def look(placements: Sequence[FleetPlacement], seed: int) -> list[Judgement]:
        workers = min(MOST, os.cpu_count() or 1, len(placements))
        if workers < 2:
            return [judge(request, one, seed=seed) for one in placements]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            return list(pool.map(partial(judge, request, seed=seed), placements))

    return look
