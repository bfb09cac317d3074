"""Trajectories that move between replicas: owned by one at any moment, whatever happens on the way."""

import asyncio
from collections import Counter

import pytest

from laminar_py.control.waiting import Router
from laminar_py.records.events import Assigned, Interrupted
from laminar_py.records.replica import Move
from laminar_py.records.trajectory import DropReason, FinishReason, Status
from tests.control.fleet import Fleet, settle


async def moving(*, replicas=2, tokens=3, **settings):
    """A fleet whose replica 0 has a group of two, and one of them on its way to replica 1."""
    fleet = Fleet(replicas=replicas, group_size=2, capacity=1, **settings)
    await fleet.report(0)
    name = "g0.0"
    if tokens:
        await fleet.grow(0, name, tokens=tokens)
    for index in range(1, replicas):
        await fleet.report(index, admissible=0)
    fleet.round = fleet.scheduler.dispatcher.move(0, [Move(name, 0, 1, 6)])
    assert fleet.round.asked == {0: [name]}
    return fleet, name


def settled(fleet):
    return fleet.round.done.is_set()


async def test_it_goes_on_at_its_destination_with_its_prefix_under_its_version():
    fleet, name = await moving()
    assert not settled(fleet)
    await fleet.finish(0, name, tokens=2, reason=FinishReason.ABORT)
    item = fleet.running[1][name]
    assert (item.version, item.epoch, item.length) == (0, 2, 5)
    assert settled(fleet)
    assert fleet.scheduler.moves.take_called_off() == {}
    reasons = [event.reason for event in fleet.log.events if isinstance(event, Interrupted)]
    assert reasons == ["repacked"]
    prefill = len(item.prompt_ids) + 5
    assert fleet.round.prefill == {1: prefill}
    assert fleet.round.growth == [prefill - 6], "the plan counted 6 tokens"


async def test_a_second_plan_for_one_on_its_way_leaves_the_first_promise_alone():
    fleet, name = await moving(replicas=3)
    again = fleet.scheduler.dispatcher.move(0, [Move(name, 0, 1, 6)])
    assert again.done.is_set()
    assert fleet.scheduler.moves.take_called_off() == {}
    fleet.scheduler.dispatcher.move(0, [Move(name, 0, 2, 6)])
    assert fleet.scheduler.moves.take_called_off() == {2: [name]}
    assert fleet.scheduler.moves.destination(name) == (1, 0)


async def test_one_promised_anew_before_its_calling_off_was_told_is_not_called_off():
    fleet, name = await moving()
    fleet.scheduler.pause()
    fleet.scheduler.admit()
    fleet.scheduler.dispatcher.move(0, [Move(name, 0, 1, 6)])
    assert fleet.scheduler.moves.take_called_off() == {}


async def test_one_that_has_not_begun_keeps_the_version_that_it_was_given():
    fleet, name = await moving(tokens=0)
    await fleet.finish(0, name, tokens=0, reason=FinishReason.ABORT)
    assert fleet.running[1][name].version == 0


async def test_a_late_answer_of_the_source_counts_for_nothing():
    fleet, name = await moving()
    late = fleet.running[0][name]
    await fleet.finish(0, name, tokens=1, reason=FinishReason.ABORT)
    fleet.running[0][name] = late
    await fleet.finish(0, name, tokens=4, reason=FinishReason.STOP)
    assert fleet.scheduler.state.live[name].status is Status.RUNNING
    assert fleet.scheduler.state.live[name].length == 4


async def test_one_that_finishes_before_it_is_asked_stays_and_the_destination_is_told():
    fleet, name = await moving()
    await fleet.finish(0, name)
    assert fleet.scheduler.state.live[name].status is Status.FINISHED
    assert fleet.scheduler.moves.take_called_off() == {1: ["g0.0"]}
    assert settled(fleet)


async def test_the_source_dies_and_its_last_report_goes_on_at_the_destination():
    fleet, name = await moving()
    await fleet.lose_replica(0)
    fleet.hand_out()
    assert fleet.running[1][name].length == 3
    assert settled(fleet)


async def test_the_destination_dies_and_another_of_that_version_takes_it():
    fleet, name = await moving(replicas=3)
    await fleet.lose_replica(1)
    await fleet.finish(0, name, tokens=1, reason=FinishReason.ABORT)
    owners = [index for index in (0, 2) if name in fleet.running[index]]
    assert len(owners) == 1
    assert fleet.scheduler.moves.take_called_off() == {1: ["g0.0"]}
    assert settled(fleet)


async def test_the_destination_has_left_the_version_and_the_source_still_serves_it():
    fleet, name = await moving()
    fleet.versions[1] = 1
    await fleet.report(1, admissible=0)
    await fleet.finish(0, name, tokens=1, reason=FinishReason.ABORT)
    assert fleet.running[0][name].version == 0
    assert settled(fleet)


async def test_a_group_past_its_deadline_ends_the_moves_of_its_members():
    fleet, name = await moving(group_deadline_s=1.0)
    await fleet.finish(0, "g0.1")
    fleet.clock.time = 2.0
    await fleet.scheduler.incoming.enforce_deadlines()
    assert name not in fleet.scheduler.state.live
    assert fleet.scheduler.moves.take_called_off() == {1: ["g0.0"]}
    assert settled(fleet)


async def test_what_the_engine_refuses_ends_its_move():
    fleet, name = await moving()
    await fleet.refuse(0, name)
    assert name not in fleet.scheduler.state.live
    assert DropReason.REFUSED in {event.reason for event in fleet.log.events if hasattr(event, "reason")}
    assert settled(fleet)


@pytest.mark.parametrize("wrong", ["elsewhere", "finished", "moving", "other version", "destination left"])
async def test_a_plan_is_checked_against_what_is_true_when_it_is_carried_out(wrong):
    fleet = Fleet(replicas=3, group_size=2, capacity=1)
    await fleet.report(0)
    await fleet.grow(0, "g0.0", tokens=3)
    await fleet.report(1, admissible=0)
    await fleet.report(2, admissible=0)
    version, source = 0, 0
    if wrong == "elsewhere":
        source = 2
    elif wrong == "finished":
        await fleet.finish(0, "g0.0")
    elif wrong == "moving":
        fleet.scheduler.dispatcher.move(0, [Move("g0.0", 0, 2, 6)])
    elif wrong == "other version":
        version = 1
    else:
        fleet.versions[1] = 1
        await fleet.report(1, admissible=0)
    assert fleet.scheduler.dispatcher.move(version, [Move("g0.0", source, 1, 6)]).asked == {}
    assert fleet.scheduler.moves.take_called_off() == {1: ["g0.0"]}


async def test_moved_trajectories_take_nothing_from_what_a_replica_admits():
    fleet, name = await moving()
    await fleet.finish(0, name, reason=FinishReason.ABORT)
    await fleet.report(1, admissible=2)
    assert fleet.scheduler.views.by_index[1].admissible == 2


async def test_a_round_waits_until_all_that_it_moved_has_settled():
    fleet, name = await moving()
    waiting = asyncio.create_task(fleet.round.done.wait())
    await settle()
    assert not waiting.done()
    await fleet.finish(0, name, reason=FinishReason.ABORT)
    await asyncio.wait_for(waiting, 1)
    assert (fleet.round.num_running, fleet.round.num_waiting) == (1, 0)
    assert fleet.round.prefill == {1: 3 + 3 + 3}, "prompt, and all of the response that it came with"
    assert Counter(event.epoch for event in fleet.log.events if isinstance(event, Assigned)) == {1: 2, 2: 1}


async def test_a_promised_replica_gets_no_work_of_another_version():
    fleet, _ = await moving(replicas=3)
    fleet.versions[2] = 1
    await fleet.report(2, admissible=0)

    def taking(version):
        return Router(fleet.scheduler.state).for_pinned(version)

    assert taking(1).index == 2
    await fleet.lose_replica(2)
    assert fleet.scheduler.views.by_index[1].idle
    assert taking(1) is None, "replica 1 keeps its version for what moves there"
    fleet.scheduler.moves.end_all()
    assert taking(1).index == 1


async def test_nothing_moves_when_training_pauses_and_the_destinations_are_told():
    fleet, name = await moving()
    fleet.scheduler.pause()
    assert settled(fleet)
    assert fleet.scheduler.moves.take_called_off() == {1: ["g0.0"]}
    assert fleet.scheduler.dispatcher.move(0, [Move(name, 0, 1, 6)]).asked == {}
