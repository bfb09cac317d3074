"""Which replicas leave a fleet that becomes smaller, and which join a larger one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from laminar_py.config.loading import load_config
from laminar_py.control.live_settings import LiveSettings
from laminar_py.control.state import Phase
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import Scaled
from laminar_py.runtime.cluster.placement import Needs
from laminar_py.runtime.orchestrator.fleet import ElasticFleet
from laminar_py.runtime.orchestrator.setup import make_scheduler
from tests.builders import make_prompt
from tests.control.fleet import Fleet, Log, ManualClock
from tests.runs.runs import REPO
from tests.workers.fakes import make_incarnation

NO_SETS = SimpleNamespace(sets={}, first_of_tasks=[])


class DiskLog(Log):
    """A log that has nothing to write."""

    async def commit(self):
        pass

    async def copy(self):
        pass


async def test_a_smaller_fleet_loses_replicas_without_a_process_first_and_then_the_least_busy(tmp_path):
    config = load_config(REPO / "configs/quickstart.yaml", ["rollout.replicas=4"])
    log, needs = DiskLog(), Needs(ranks=1, rank_gpus=0, replicas=4, replica_gpus=0)

    async def scale_placement(replicas, gone):
        placement.needs = replace(placement.needs, replicas=replicas, gone=gone)
        placement.plan.replicas = [None] * replicas

    placement = SimpleNamespace(needs=needs, plan=SimpleNamespace(replicas=[]), scale=scale_placement)
    joined, scheduler = [], Fleet(replicas=4, max_staleness=4).scheduler
    fleet = ElasticFleet(
        make_incarnation(config=config, run=RunFolder(tmp_path), ledger=log, placement=placement, inputs=NO_SETS),
        settings=LiveSettings(config, scheduler=scheduler),
        scheduler=scheduler,
        replicas=SimpleNamespace(left={}, has_process=lambda index: index != 0, join=joined.append),
        scoring=SimpleNamespace(grow=lambda queue: None),
        dispatch_loop=SimpleNamespace(wake=lambda: None),
        show_line=print,
    )
    scheduler.views.send(2, "g0.0")
    assert await fleet.resize(2) == "replicas 4 -> 2; 0 have a place, the others wait for a node that has room"
    assert log.events[-1] == Scaled((1, 2))
    assert await fleet.resize(3) == "replicas 2 -> 3; 0 have a place, the others wait for a node that has room"
    assert log.events[-1] == Scaled((1, 2, 4)), "a number is never used again"
    assert placement.needs.replicas == 5


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
        incarnation, submit_for_scoring=lambda trajectory, prompt: None, frozen=(), fail=print
    )
    assert scheduler.state.phase is phase
