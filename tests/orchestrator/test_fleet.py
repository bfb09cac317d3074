"""What an elastic fleet chooses, while replicas come to an end beside it."""

from types import SimpleNamespace

import pytest

from laminar_py.config.loading import load_config, scaled
from laminar_py.control.book import Phase
from laminar_py.control.moves import Round
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.runtime.orchestrator import fleet as fleet_module
from laminar_py.runtime.orchestrator.fleet import ElasticFleet
from laminar_py.runtime.orchestrator.parts import make_scheduler
from tests.builders import make_prompt
from tests.control.fleet import Fleet, Log, ManualClock
from tests.runs.runs import REPO
from tests.workers.fakes import make_incarnation


def elastic(path, *, replicas, ended):
    """A fleet without processes; those in `ended` do not come back."""
    config = load_config(REPO / "configs/quickstart.yaml", [f"rollout.replicas={replicas}"])
    fleet = ElasticFleet(
        make_incarnation(config=config, run=RunFolder(path)),
        scheduler=Fleet(replicas=replicas).scheduler,
        replicas=SimpleNamespace(is_ending=ended.__contains__, left=ended, has_process=lambda index: True),
        migration=None,
        scoring=None,
        issuing=None,
    )
    return fleet, config


async def test_what_left_while_new_ones_were_checked_is_not_counted_on(monkeypatch, tmp_path):
    ended, checked = set(), []

    def check(config, change):
        checked.append(change.join)
        fleet._scheduler.leave(2)
        ended.add(2)

    monkeypatch.setattr(fleet_module, "_check_new", check)
    fleet, config = elastic(tmp_path, replicas=3, ended=ended)
    change = await fleet._checked(scaled(config, replicas=3, urls=None))
    assert (change.stay, change.back, change.leave, change.join) == ([0, 1], [], [], 1)
    assert checked == [0, 1], "the one in its place is checked too"


async def test_room_is_what_a_replica_of_the_version_has_left_beside_what_is_on_its_way(tmp_path):
    fleet, config = elastic(tmp_path, replicas=3, ended=set())
    scheduler, slots = fleet._scheduler, config.rollout.max_batch
    for index, version in enumerate((0, 0, 1)):
        scheduler.views.reported(index, version=version, admissible=7, received=0)
        scheduler.views.send(index, f"g{index}.0")
    scheduler.moves.begin(Round(version=0, open={"x": 1}, planned={"x": 0}))
    assert fleet._rooms({0}) == {0: {0: slots - 1, 1: slots - 2}}
    assert fleet._rooms({None}) == {None: {0: 6, 1: 6, 2: 6}}
    assert fleet._rooms({5}) == {}, "nobody is asked what it has"


@pytest.mark.parametrize(("number", "phase"), [(1, Phase.PAUSED), (2, Phase.RESTORING)])
def test_nothing_is_handed_out_before_what_a_dead_controller_left_is_taken_up(number, phase):
    stream = SimpleNamespace(prompt=make_prompt, record_group=lambda group: None)
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
