"""Words on what a run does now."""

from types import SimpleNamespace
from typing import cast

from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.observe.live import View
from laminar_py.runtime.orchestrator.progress import Progress
from laminar_py.runtime.orchestrator.scoring import Scoring
from laminar_py.runtime.workers.incarnation import Incarnation
from tests.control.fleet import ManualClock


def test_responses_that_lost_their_weights_are_counted_in_one_line_once_the_number_has_settled() -> None:
    config = SimpleNamespace(rollout=SimpleNamespace(prompts_per_step=4))
    incarnation = SimpleNamespace(clock=ManualClock(), config=config, stats=None)
    lines: list[str] = []
    progress = Progress(
        cast(Incarnation, incarnation),
        view=cast(View, SimpleNamespace(notice=lines.append)),
        scheduler=cast(TrajectoryScheduler, None),
        scoring=cast(Scoring, None),
    )
    for lost in (0, 0, 17, 51, 51, 51, 52, 52):
        progress._show_lost(lost)
    begun = "begun again: {} under way, whose weights no relay has any more (version_lost)"
    assert lines == [begun.format("51 responses"), begun.format("1 response")]
