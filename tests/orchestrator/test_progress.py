"""Words on what a run does now."""

from types import SimpleNamespace
from typing import cast

from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.observe.live import View
from laminar_py.observe.stats import Stats, Totals
from laminar_py.records.host import Clock
from laminar_py.runtime.orchestrator.progress import RunProgress
from laminar_py.runtime.orchestrator.scoring import Scoring
from laminar_py.runtime.workers.incarnation import Incarnation
from tests.control.fleet import ManualClock


def test_responses_that_lost_their_weights_are_counted_in_one_line_once_the_number_has_settled() -> None:
    config = SimpleNamespace(fresh_groups=4)
    incarnation = SimpleNamespace(clock=ManualClock(), config=config, stats=None)
    lines: list[str] = []
    progress = RunProgress(
        cast(Incarnation, incarnation),
        view=cast(View, SimpleNamespace(notice=lines.append)),
        scheduler=cast(TrajectoryScheduler, None),
        scoring=cast(Scoring, None),
    )
    for lost in (0, 0, 17, 51, 51, 51, 52, 52):
        progress._show_lost(lost)
    begun = "begun again: {} under way, whose weights no relay has any more (version_lost)"
    assert lines == [begun.format("51 responses"), begun.format("1 response")]


def test_a_long_step_shows_its_seconds_and_the_tokens_that_come_meanwhile() -> None:
    """The user saw "waiting for: 60 responses being generated" for a minute, and nothing that counted."""
    clock = ManualClock()
    config = SimpleNamespace(fresh_groups=4)
    stats = Stats(cast(Clock, clock), replicas=1, totals=Totals(rl_s=390.0, generated_tokens=9_000))
    state = SimpleNamespace(generated_tokens=0)
    progress = RunProgress(
        cast(Incarnation, SimpleNamespace(clock=clock, config=config, stats=stats)),
        view=cast(View, None),
        scheduler=cast(TrajectoryScheduler, SimpleNamespace(state=state)),
        scoring=cast(Scoring, None),
    )
    stats.set_rl_phase(True)
    told = []
    for _ in range(3):
        told.append(progress._describe_step(3))
        clock.time += 10.0
        state.generated_tokens += 4_000
    assert told == [
        "step 3: 0 s so far, 0 tokens generated, 0 a second now",
        "step 3: 10 s so far, 4,000 tokens generated, 400 a second now",
        "step 3: 20 s so far, 8,000 tokens generated, 400 a second now",
    ]
