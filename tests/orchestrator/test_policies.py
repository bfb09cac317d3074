"""What a controller makes of its config: the scheduler of a run that goes on waits for what a dead one left."""

from types import SimpleNamespace

import pytest

from laminar_py.config.loading import load_config
from laminar_py.control.book import Phase
from laminar_py.runtime.orchestrator.parts import make_scheduler
from tests.builders import make_prompt
from tests.control.fleet import Log, ManualClock
from tests.runs.runs import REPO
from tests.workers.fakes import make_incarnation


@pytest.mark.parametrize(("number", "phase"), [(1, Phase.PAUSED), (2, Phase.RESTORING)])
def test_nothing_is_handed_out_before_what_a_dead_controller_left_is_taken_up(number, phase):
    stream = SimpleNamespace(prompt=make_prompt, tell=lambda group: None)
    incarnation = make_incarnation(
        config=load_config(REPO / "configs/quickstart.yaml", []),
        inputs=SimpleNamespace(stream=stream, tokenizer=SimpleNamespace(eos_ids=(1,))),
        ledger=Log(),
        clock=ManualClock(),
        number=number,
    )
    scheduler = make_scheduler(
        incarnation, submit_score=lambda trajectory, prompt: None, reference=None, fail=print
    )
    assert scheduler.book.phase is phase
