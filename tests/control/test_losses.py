"""Tokens that are lost with their host: what had some is dropped and begun anew, and nothing else suffers."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.config.rollout import WithoutSignal
from laminar_py.control.evaluation import EvaluationLostError
from laminar_py.learner.packing.buffer import Packing
from laminar_py.records.columns import REFERENCE_LOGPROBS
from laminar_py.records.events import Dropped, Interrupted
from laminar_py.records.spans import covers
from laminar_py.records.trajectory import DropReason, FinishReason, Kind, Status
from tests.builders import make_prompt
from tests.control.fleet import REFERENCE, Fleet, segment_of
from tests.control.test_restore import left, restored
from tests.control.test_scheduler import assert_law_one
from tests.depth import examples
from tests.ledger.runs import begin, open_ledger

HOST = "host 10.0.0.2 is gone"


def dropped(fleet):
    """Reasons by trajectory."""
    return {event.trajectory_id: event.reason for event in fleet.log.events if isinstance(event, Dropped)}


def issued_anew(fleet, *ids):
    """True where these are the live samples of g0 that came later than its first ones."""
    live = fleet.scheduler.state.live.values()
    return {one.id for one in live if one.group_id == "g0" and one.sample_index >= 4} == set(ids)


async def lose_host_of(fleet, replica):
    """The host of a replica is gone, and with it the process and all that it wrote."""
    await fleet.scheduler.incoming.on_replica_lost(replica)
    fleet.running[replica].clear()
    fleet.received[replica] = 0
    await fleet.lose_segment(segment_of(replica), HOST)


async def one_group(**settings):
    """Two replicas; the first has a group of four."""
    fleet = Fleet(replicas=2, capacity=1, **{"one_version": False} | settings)
    await fleet.report(0)
    await fleet.report(1, admissible=0)
    return fleet


async def test_what_runs_elsewhere_with_tokens_of_a_lost_host_is_dropped_and_its_replica_told():
    fleet = await one_group()
    await fleet.finish(0, "g0.0", reason=FinishReason.ABORT, admissible=0)
    await fleet.report(1, admissible=1)
    assert "g0.0" in fleet.running[1], "with its first tokens on the host of replica 0"
    await lose_host_of(fleet, 0)
    assert dropped(fleet) == {"g0.0": DropReason.TOKENS_LOST}
    assert fleet.scheduler.state.take_aborts() == {1: ["g0.0"]}
    assert fleet.scheduler.state.take_aborts() == {}, "told once"
    assert issued_anew(fleet, "g0.4")
    assert_law_one(fleet)
    await fleet.finish(1, "g0.0", admissible=0)  # its last word is on the way
    assert not fleet.unscored


async def test_what_had_told_no_tokens_is_only_interrupted_and_goes_on_elsewhere():
    fleet = await one_group()
    await fleet.grow(0, "g0.1", tokens=2)
    await lose_host_of(fleet, 0)
    assert dropped(fleet) == {"g0.1": DropReason.TOKENS_LOST}
    reasons = [event.reason for event in fleet.log.events if isinstance(event, Interrupted)]
    assert reasons == ["replica_crashed"] * 4
    assert fleet.scheduler.state.take_aborts() == {}, "nobody runs it any more"
    await fleet.report(1)
    assert set(fleet.running[1]) == {"g0.0", "g0.2", "g0.3", "g0.4"}
    assert {item.length for item in fleet.running[1].values()} == {0}


async def test_what_waits_is_finished_or_scored_is_dropped_and_begun_anew_while_its_group_is_open():
    fleet = await one_group()
    fleet.scheduler.pause()
    await fleet.finish(0, "g0.0", reason=FinishReason.ABORT)
    await fleet.finish(0, "g0.1")
    await fleet.score_all()
    await fleet.finish(0, "g0.2")
    live = fleet.scheduler.state.live
    states = [live[f"g0.{index}"].status for index in range(4)]
    assert states == [Status.INTERRUPTED, Status.SCORED, Status.FINISHED, Status.RUNNING]
    await lose_host_of(fleet, 0)
    assert dropped(fleet) == dict.fromkeys(["g0.0", "g0.1", "g0.2"], DropReason.TOKENS_LOST)
    assert issued_anew(fleet, "g0.4", "g0.5", "g0.6")
    await fleet.score_all()  # its score comes for nobody
    fleet.scheduler.admit()
    await fleet.report(1)
    assert set(fleet.running[1]) == {"g0.3", "g0.4", "g0.5", "g0.6"}
    await fleet.finish_all(1, admissible=0)
    await fleet.score_all()
    assert len(fleet.scheduler.consumption.buffer[0].members) == 4, "none of its group is missing"
    assert_law_one(fleet)


async def test_ready_ones_leave_their_group_and_its_bins_and_the_last_takes_the_group_along():
    packing = Packing(max_tokens=128)
    fleet = Fleet(replicas=2, group_size=2, batch=2, capacity=2, one_version=False, packing=packing)
    await fleet.report(0)
    await fleet.finish(0, "g1.1", tokens=0, reason=FinishReason.ABORT, admissible=0)
    await fleet.report(1, admissible=1)
    for index in (0, 1):
        await fleet.finish_all(index, admissible=0)
    await fleet.score_all()
    buffer = fleet.scheduler.consumption.buffer
    assert [len(group.members) for group in buffer.first(2)] == [2, 2]
    await lose_host_of(fleet, 1)
    assert dropped(fleet) == {"g1.1": DropReason.TOKENS_LOST}
    assert sorted(len(group.members) for group in buffer.first(2)) == [1, 2]
    batch = await asyncio.wait_for(fleet.scheduler.next_batch(groups=2, version=0), 5)
    assert not {trajectory.id for trajectory in batch.trajectories} & dropped(fleet).keys()
    await fleet.scheduler.consumption.put_back(batch)
    await lose_host_of(fleet, 0)
    assert len(buffer) == 0
    assert not fleet.scheduler.state.groups.keys() & {"g0", "g1"}
    assert_law_one(fleet)


async def test_a_column_that_is_lost_takes_its_response_along():
    fleet = await one_group(refers=[REFERENCE_LOGPROBS])
    await fleet.finish_all(0, admissible=0)
    await fleet.score_all()
    await fleet.refer_all()
    await fleet.lose_segment(REFERENCE, HOST)
    assert dropped(fleet) == dict.fromkeys([f"g0.{index}" for index in range(4)], DropReason.TOKENS_LOST)


async def test_a_restored_group_waits_for_no_reference_of_what_cannot_be_read():
    for lost, members in ((["g1.0"], ["g1.1"]), (["g1.0", "g1.1"], [])):
        ready = [left("g1.0", Status.READY, reward=1.0), left("g1.1", Status.READY, reward=0.0)]
        fleet = await restored(*ready, refers=[REFERENCE_LOGPROBS])
        fleet.unreferred = [one for one in fleet.unreferred if one[1].id not in lost]
        await fleet.refer_all()
        assert len(fleet.scheduler.consumption.buffer) == 0
        await fleet.scheduler.incoming.drop_lost(
            dict.fromkeys(lost, "its segment is gone")
        )  # as the reference model says
        assert [m.id for g in fleet.scheduler.consumption.buffer.first(1) for m in g.members] == members
        assert dropped(fleet) == dict.fromkeys(lost, DropReason.TOKENS_LOST)
        assert ("g1" in fleet.scheduler.state.groups) == bool(members)


async def test_what_the_learner_has_in_hand_stays():
    fleet = await one_group()
    await fleet.finish_all(0, admissible=0)
    await fleet.score_all()
    batch = await asyncio.wait_for(fleet.scheduler.next_batch(groups=1, version=0), 5)
    await lose_host_of(fleet, 0)
    await fleet.scheduler.consumption.commit(batch, 1)
    assert not dropped(fleet)
    assert_law_one(fleet)


async def test_an_evaluation_of_which_an_answer_is_lost_fails():
    fleet = Fleet(replicas=2)
    fleet.scheduler.pause()
    done = fleet.scheduler.evaluations.request([make_prompt(0), make_prompt(1)], 0)
    await fleet.report(0)
    await fleet.finish(0, "e0.0")
    await fleet.scheduler.incoming.drop_lost({"e0.0": HOST})
    assert dropped(fleet) == {"e0.0": DropReason.TOKENS_LOST}
    await fleet.finish(0, "e0.1")
    await fleet.score_all(lambda index: 1.0)
    with pytest.raises(EvaluationLostError):
        await done
    assert not [one for one in fleet.scheduler.state.live.values() if one.kind is Kind.EVAL]


async def test_what_was_unreachable_and_is_lost_besides_is_dropped_once():
    fleet = Fleet(replicas=2, group_size=2, capacity=1)
    await fleet.report(0)
    for name in ("g0.0", "g0.1"):
        await fleet.grow(0, name, tokens=3)
    fleet.versions[1] = 1
    await fleet.report(1, admissible=0)
    await fleet.lose_replica(0)
    fleet.scheduler.views.planned([False, True])
    fleet.hand_out()  # finds that nobody serves version 0 any more
    await fleet.lose_segment(segment_of(0), HOST)
    await fleet.scheduler.incoming.enforce_deadlines()
    assert dropped(fleet) == dict.fromkeys(["g0.0", "g0.1"], DropReason.TOKENS_LOST)


async def test_a_prefix_that_a_replica_cannot_read_is_dropped_and_begun_anew():
    fleet = await one_group()
    await fleet.finish(0, "g0.0", reason=FinishReason.ABORT, admissible=0)
    await fleet.report(1, admissible=1)
    await fleet.miss(1, "g0.0")
    assert dropped(fleet) == {"g0.0": DropReason.TOKENS_LOST}
    assert "g0.0" not in fleet.scheduler.views.by_index[1].in_flight
    assert issued_anew(fleet, "g0.4")


# ---- what journals had


async def test_what_a_dead_replica_had_goes_on_where_its_journal_ends_under_that_version():
    fleet = Fleet(replicas=2, capacity=1, group_size=2)
    await fleet.report(0)
    fleet.versions[1] = 0
    await fleet.report(1, admissible=0)
    await fleet.grow(0, "g0.0", tokens=2)
    told = fleet.salvaged(0, "g0.0", tokens=3, used_s=4.5)
    untold = fleet.salvaged(0, "g0.1", tokens=4, used_s=1.5)
    await fleet.lose_replica(0, salvaged=[told, untold])
    cut = {event.trajectory_id: event for event in fleet.log.events if isinstance(event, Interrupted)}
    assert {name: (event.length, event.used_s) for name, event in cut.items()} == {
        "g0.0": (5, 4.5),
        "g0.1": (4, 1.5),
    }
    await fleet.report(1)
    items = fleet.running[1]
    assert {name: (item.length, item.version) for name, item in items.items()} == {"g0.0": (5, 0), "g0.1": (4, 0)}
    assert covers(fleet.scheduler.state.live["g0.0"].token_spans, 0, 5)


@pytest.mark.parametrize("start", [1, 3], ids=["told meanwhile", "a gap"])
async def test_what_does_not_go_on_where_the_record_ends_is_left_out(start):
    fleet = Fleet(replicas=2, capacity=1, group_size=2)
    await fleet.report(0)
    await fleet.grow(0, "g0.0", tokens=2)
    salvaged = [fleet.salvaged(0, "g0.0", tokens=3, start=start)]
    await fleet.lose_replica(0, salvaged=salvaged)
    assert fleet.scheduler.state.live["g0.0"].length == 2


async def test_what_is_known_of_a_replica_is_where_its_journal_is_to_go_on():
    fleet = await one_group()
    await fleet.grow(0, "g0.0", tokens=2)
    await fleet.finish(0, "g0.1", admissible=0)
    known = fleet.scheduler.incoming.running_on(0)
    assert {name: (one.epoch, one.length) for name, one in known.items()} == {
        "g0.0": (1, 2),
        "g0.2": (1, 0),
        "g0.3": (1, 0),
    }


async def test_a_step_has_as_many_versions_as_its_trajectories_are_of_and_run_under():
    fleet = await one_group()
    assert fleet.scheduler.state.versions_alive() == 1, "what runs has told no token"
    await fleet.grow(0, "g0.0", tokens=2)
    fleet.versions[0] = 3
    await fleet.report(0, admissible=0)
    assert fleet.scheduler.state.versions_alive() == 2


# ---- whatever happens

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["finish", "grow", "abort", "score", "kill", "host", "step", "back"]), st.integers(0, 9)
    ),
    max_size=60,
)


@settings(max_examples=examples(40), deadline=None)
@given(ACTIONS, st.sampled_from([WithoutSignal.TRAIN, WithoutSignal.REFILL]))
def test_the_account_is_balanced_whatever_is_lost(actions, without_signal):
    """The events are taken by the ledger's machine, which refuses illegal ones."""
    asyncio.run(play(actions, without_signal))


async def play(actions, without_signal):
    with tempfile.TemporaryDirectory() as folder:
        async with open_ledger(Path(folder)) as ledger:
            begin(ledger)
            fleet = Fleet(batch=2, capacity=8, without_signal=without_signal, one_version=False, recorder=ledger)
            step = 0
            for name, number in actions:
                step = await act(fleet, name, number, step)
                account, live = ledger.accounting().train, fleet.scheduler.state.live.values()
                assert account.live == sum(one.kind is Kind.TRAIN for one in live)
                assert account.issued == account.consumed + sum(account.dropped.values()) + account.live
                assert not set(account.dropped) - {"tokens_lost", "no_signal"}
                assert fleet.scheduler.views.in_flight == sum(one.runs_on is not None for one in live)


async def act(fleet, name, number, step):
    """One thing happens; the step that the learner is at."""
    index, consumption = number % 2, fleet.scheduler.consumption
    await fleet.report(index)
    running = list(fleet.running[index])
    chosen = running[number % len(running)] if running else None
    if name == "finish" and chosen:
        await fleet.finish(index, chosen)
    elif name == "grow" and chosen:
        await fleet.grow(index, chosen, tokens=1 + number)
    elif name == "abort" and chosen:
        await fleet.finish(index, chosen, reason=FinishReason.ABORT)
    elif name == "score":
        await fleet.score_all()
    elif name == "kill":
        salvaged = [fleet.salvaged(index, one, tokens=2) for one in running[::2]]
        fleet.running[index].clear()
        fleet.received[index] = 0
        await fleet.lose_replica(index, salvaged=salvaged)
    elif name == "host":
        await lose_host_of(fleet, index)
    elif name in ("step", "back") and len(consumption.buffer) >= 2:
        batch = await consumption.next_batch(groups=2, version=0)
        if name == "back":
            await consumption.put_back(batch)
        else:
            step += 1
            await consumption.commit(batch, step)
    for replica, ids in fleet.scheduler.state.take_aborts().items():
        for id in ids:
            fleet.running[replica].pop(id, None)
    return step
