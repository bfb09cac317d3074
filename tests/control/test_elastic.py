"""Replicas that join and leave while a run goes on: what is given to whom, and that nothing is lost."""

from laminar_py.config.loading import load_config
from laminar_py.config.rollout import Schedule
from laminar_py.records.events import Dropped
from laminar_py.records.replica import Move
from laminar_py.records.trajectory import FinishReason
from tests.builders import make_prompt
from tests.control.fleet import Fleet
from tests.runs.runs import REPO


def dropped(fleet):
    return [event for event in fleet.log.events if isinstance(event, Dropped)]


def join(fleet, index):
    """A new replica, which has a place, serves the newest version once it reports."""
    fleet.scheduler.views.join(index)
    fleet.scheduler.views.planned([True] * (index + 1))
    fleet.versions[index], fleet.received[index], fleet.running[index] = 0, 0, {}


async def test_one_that_joins_is_given_work_once_it_has_reported():
    fleet = Fleet(replicas=1, group_size=2, capacity=2)
    await fleet.report(0, admissible=2)
    join(fleet, 1)
    fleet.hand_out()
    assert not fleet.running[1]
    await fleet.report(1)
    assert len(fleet.running[1]) == 2


async def test_one_that_leaves_ends_what_it_has_and_is_given_nothing_new():
    fleet = Fleet(replicas=2, group_size=2, capacity=2)
    for index in (0, 1):
        await fleet.report(index, admissible=2)
    fleet.scheduler.leave(1)
    await fleet.finish_all(1)
    await fleet.score_all()
    assert not fleet.running[1]
    assert not dropped(fleet)


async def test_the_share_of_a_batch_follows_the_number_of_those_that_stay():
    fleet = Fleet(replicas=2, group_size=2, batch=4, schedule=Schedule.SYNC)
    await fleet.report(0)
    assert len(fleet.running[0]) == 4, "half of a batch"
    fleet.scheduler.leave(1)
    fleet.hand_out()
    assert len(fleet.running[0]) == 8, "all of it"


async def test_what_no_other_can_go_on_with_goes_back_to_the_one_that_leaves():
    fleet = Fleet(replicas=2, group_size=2, capacity=1)
    await fleet.report(0)
    for name in list(fleet.running[0]):
        await fleet.grow(0, name, tokens=2)
    fleet.versions[1] = 1
    await fleet.report(1, admissible=0)
    fleet.scheduler.leave(0)
    names = set(fleet.running[0])
    for name in names:
        await fleet.finish(0, name, tokens=1, reason=FinishReason.ABORT)
    assert set(fleet.running[0]) == names
    assert not dropped(fleet)


async def test_a_move_to_one_that_leaves_is_called_off_and_ends_at_another():
    fleet = Fleet(replicas=3, group_size=2, capacity=1)
    await fleet.report(0)
    for index in (1, 2):
        await fleet.report(index, admissible=0)
    fleet.scheduler.dispatcher.move(0, [Move("g0.0", 0, 1, 6)])
    fleet.scheduler.leave(1)
    assert fleet.scheduler.moves.take_called_off() == {1: ["g0.0"]}
    assert not fleet.scheduler.moves.expected(1)
    await fleet.finish(0, "g0.0", tokens=2, reason=FinishReason.ABORT)
    assert "g0.0" in fleet.running[2]


async def test_a_pass_whose_version_is_open_begins_at_one_that_stays():
    fleet = Fleet(replicas=2, group_size=2, capacity=1)
    for index in (0, 1):
        await fleet.report(index, admissible=0)
    fleet.scheduler.leave(0)
    done = fleet.scheduler.evaluations.request([make_prompt(90), make_prompt(91)])
    fleet.hand_out()
    assert not fleet.running[0]
    assert len(fleet.running[1]) == 2
    await fleet.finish_all(1)
    await fleet.score_all()
    assert done.result().version == 0


async def test_a_pass_goes_on_where_its_version_is_though_that_leaves():
    fleet = Fleet(replicas=2, group_size=2, capacity=1, batch_per_replica=1)
    await fleet.report(0, admissible=0)
    done = fleet.scheduler.evaluations.request([make_prompt(90), make_prompt(91)])
    fleet.hand_out()
    (first,) = fleet.running[0]
    fleet.versions[1] = 1
    await fleet.report(1, admissible=0)
    fleet.scheduler.leave(0)
    await fleet.finish(0, first, admissible=0)
    await fleet.score_all()
    fleet.hand_out()
    await fleet.finish_all(0, admissible=0)
    await fleet.score_all()
    assert done.result().version == 0
    assert not fleet.running[1]


def test_the_number_of_live_groups_follows_the_fleet():
    fleet = Fleet(replicas=1, group_size=2, capacity=1)
    assert fleet.scheduler.router.num_admitted == 1
    sizes = ["rollout.group_size=2", "rollout.prompts_per_step=2", "buffer.capacity=6"]
    fleet.scheduler.adopt(load_config(REPO / "configs/quickstart.yaml", sizes))
    assert fleet.scheduler.router.num_admitted == 3
