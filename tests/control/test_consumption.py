"""Batches: order, staleness, what is too long; and that none of it favours a length."""

import asyncio
import heapq
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.config.rollout import StalePolicy
from laminar_py.control import consumption as consumption_module
from laminar_py.learner.packing.buffer import Packing
from laminar_py.records.events import Consumed, Dropped
from laminar_py.records.trajectory import DropReason
from laminar_py.runtime.orchestrator.trainer import finish_despite_cancel
from tests.control.fleet import Fleet, settle
from tests.control.test_scheduler import assert_law_one
from tests.depth import examples

PATIENCE_S = 5.0
MAX_TOKENS = 128


def make_fleet(*, groups=4, group_size=2, capacity=16, max_tokens=MAX_TOKENS, cuts=True, **kwargs):
    """One replica; steps of so many groups are packed."""
    packing = Packing(max_tokens=max_tokens, cuts=cuts)
    return Fleet(replicas=1, group_size=group_size, batch=groups, capacity=capacity, packing=packing, **kwargs)


async def make_ready(fleet, lengths):
    """Groups g0, g1 ... whose two members have so many response tokens each, prompts 3."""
    await fleet.report(0)
    for index, length in enumerate(lengths):
        for member in range(2):
            await fleet.finish(0, f"g{index}.{member}", tokens=length, admissible=0)
    await fleet.score_all()


async def take(fleet, groups, version=0):
    async with asyncio.timeout(PATIENCE_S):
        return await fleet.scheduler.next_batch(groups=groups, version=version)


def ids(batch):
    return sorted(trajectory.id for trajectory in batch.trajectories)


def taken(batch):
    return [group.group_id for group in batch.groups]


def reasons(fleet):
    return Counter(event.reason for event in fleet.log.events if isinstance(event, Dropped))


async def test_a_batch_that_was_put_back_is_taken_again_before_younger_groups():
    fleet = make_fleet(groups=2)
    await make_ready(fleet, [10, 20, 30, 40])
    first = await take(fleet, 2)
    await fleet.scheduler.consumption.put_back(first)
    again = await take(fleet, 2)
    assert taken(again) == taken(first)
    assert ids(again) == ids(first)


async def test_what_exceeds_a_microbatch_is_dropped_with_an_event_and_its_group_goes_on():
    fleet = make_fleet(groups=1, capacity=1)
    await fleet.report(0)
    await fleet.finish(0, "g0.0", tokens=MAX_TOKENS - 2, admissible=0)
    await fleet.finish(0, "g0.1", tokens=MAX_TOKENS - 3, admissible=0)
    await fleet.score_all()
    assert reasons(fleet) == {DropReason.TOO_LONG: 1}
    batch = await take(fleet, 1)
    assert [trajectory.id for trajectory in batch.trajectories] == ["g0.1"]


@pytest.mark.parametrize(
    ("tokens", "cuts", "dropped"), [(100, True, False), (MAX_TOKENS - 4, True, True), (100, False, True)]
)
async def test_a_tree_is_too_long_only_if_one_of_its_sequences_is_or_the_loss_needs_it_whole(
    tokens, cuts, dropped
):
    """A turn of 2 tokens, and after 50 more another end behind these 2."""
    fleet = make_fleet(groups=1, capacity=1, cuts=cuts)
    await fleet.report(0)
    await fleet.grow(0, "g0.0", tokens=52)
    await fleet.finish(0, "g0.0", tokens=tokens, follows=2, admissible=0)
    await fleet.finish(0, "g0.1", admissible=0)
    await fleet.score_all()
    assert reasons(fleet) == ({DropReason.TOO_LONG: 1} if dropped else {})


async def test_a_group_that_is_all_too_long_is_live_no_more():
    fleet = make_fleet(groups=1, capacity=1)
    await make_ready(fleet, [MAX_TOKENS])
    assert reasons(fleet) == {DropReason.TOO_LONG: 2}
    assert not fleet.scheduler.state.groups
    assert not fleet.scheduler.state.live


async def test_what_became_stale_while_it_was_ready_is_not_in_the_batch():
    fleet = make_fleet(groups=2, max_staleness=1, policies=(StalePolicy.DROP,))
    await make_ready(fleet, [10, 20])
    fleet.learned(2)
    waiting = asyncio.create_task(take(fleet, 2, version=2))
    await settle()
    assert reasons(fleet) == {DropReason.STALE: 4}
    fleet.versions[0] = 2
    await fleet.report(0)
    await fleet.finish_all(0, admissible=0)
    await fleet.score_all()
    batch = await waiting
    assert {trajectory.oldest_version for trajectory in batch.trajectories} == {2}


async def make_all_but_one_score(*, version=1, last_finishes=True, policies=(StalePolicy.DROP,)):
    """g0 lacks the score, or the end, of its last member; g1 is ready, made at `version`. The bound is 1."""
    fleet = make_fleet(groups=1, group_size=3, max_staleness=1, policies=policies)
    await fleet.report(0)
    for id in ("g0.0", "g0.1"):
        await fleet.finish(0, id, admissible=0)
    await fleet.score_all()
    if last_finishes:
        await fleet.finish(0, "g0.2", admissible=0)
    late, fleet.unscored = fleet.unscored, []
    fleet.learned(version)
    fleet.versions[0] = version
    for id in ("g1.0", "g1.1", "g1.2"):
        await fleet.finish(0, id, admissible=0)
    await fleet.score_all()
    fleet.unscored = late
    return fleet


async def test_a_late_score_costs_its_own_response_and_not_its_group():
    fleet = await make_all_but_one_score()
    assert [t.id for t in (await take(fleet, 1, version=1)).trajectories] == ["g0.0", "g0.1"]
    assert [event.trajectory_id for event in fleet.log.events if isinstance(event, Dropped)] == ["g0.2"]
    assert reasons(fleet) == {DropReason.STALE: 1}
    await fleet.score_all()  # it comes for nobody
    assert_law_one(fleet)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"version": 0}, id="its score may still come in time"),
        pytest.param({"policies": (StalePolicy.REWEIGHT,)}, id="nothing is too old"),
        pytest.param({"last_finishes": False}, id="it still generates"),
    ],
)
async def test_a_group_goes_on_waiting_for_a_member_where(settings):
    fleet = await make_all_but_one_score(**settings)
    assert taken(await take(fleet, 1, version=fleet.scheduler.state.newest_version)) == ["g1"]
    assert not reasons(fleet)


async def test_a_score_that_comes_while_a_batch_is_waited_for_is_in_time():
    fleet = await make_all_but_one_score()
    waiting = asyncio.create_task(take(fleet, 2, version=1))
    await settle()
    await fleet.score_all()
    assert taken(await waiting) == ["g0", "g1"]


async def test_nothing_is_dropped_for_a_batch_that_cannot_be_taken_yet():
    """What is ready is too old, so the learner waits for g0, whose last score comes in time."""
    fleet = make_fleet(groups=1, group_size=3, max_staleness=1, policies=(StalePolicy.DROP,))
    await fleet.report(0)
    for version, group in ((0, "g1"), (1, "g0")):
        fleet.learned(version)
        fleet.versions[0] = version
        for member in range(3):
            await fleet.finish(0, f"{group}.{member}", admissible=0)
    last = fleet.unscored.pop()
    await fleet.score_all()
    fleet.learned(2)
    waiting = asyncio.create_task(take(fleet, 1, version=2))
    await settle()
    fleet.unscored = [last]
    await fleet.score_all()
    assert [trajectory.id for trajectory in (await waiting).trajectories] == ["g0.0", "g0.1", "g0.2"]
    assert reasons(fleet) == {DropReason.STALE: 3}, "g1"


async def test_a_late_score_is_waited_for_where_nothing_is_lost_by_that():
    """The others of its group are of newer weights: they learn with its reward in their baseline."""
    fleet = make_fleet(groups=1, group_size=3, max_staleness=1, policies=(StalePolicy.DROP,))
    await fleet.report(0)
    await fleet.finish(0, "g0.0", admissible=0)
    late, fleet.unscored = fleet.unscored, []
    fleet.learned(1)
    fleet.versions[0] = 1
    for id in ("g0.1", "g0.2", "g1.0", "g1.1", "g1.2"):
        await fleet.finish(0, id, admissible=0)
    await fleet.score_all()
    assert taken(await take(fleet, 1, version=1)) == ["g1"]
    assert not reasons(fleet)
    fleet.unscored = late
    await fleet.score_all()
    assert taken(await take(fleet, 1, version=1)) == ["g0"]


async def test_a_reweighted_trajectory_takes_its_factor_to_the_learner():
    fleet = make_fleet(groups=1, capacity=1, max_staleness=1, policies=(StalePolicy.REWEIGHT,))
    await make_ready(fleet, [10])
    fleet.learned(4)
    batch = await take(fleet, 1, version=4)
    assert [trajectory.weight for trajectory in batch.trajectories if trajectory.weight != 1.0] == [0.4, 0.4]
    await fleet.scheduler.consumption.commit(batch, 1)
    assert [event.weight for event in fleet.log.events if isinstance(event, Consumed)] == [0.4, 0.4]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["finish", "finish", "step", "fail", "die", "publish"]), st.integers(1, MAX_TOKENS)),
    min_size=20,
    max_size=60,
)


@settings(max_examples=examples(60), deadline=None)
@given(ACTIONS, st.sampled_from([None, 1, 2]))
def test_every_batch_is_packed_whole_and_nothing_is_lost_whatever_happens(actions, max_staleness):
    asyncio.run(play(actions, max_staleness))


async def play(actions, max_staleness):
    """Responses of random lengths, some too long; batches that are consumed, fail or are undone; versions."""
    fleet = make_fleet(groups=2, max_staleness=max_staleness, policies=(StalePolicy.DROP,))
    consumption, step, version = fleet.scheduler.consumption, 0, 0
    for action, number in actions:
        fleet.versions[0] = version
        await fleet.report(0)
        if action == "finish":
            for id in list(fleet.running[0])[: 2 + number % 3]:
                await fleet.finish(0, id, tokens=number)
            await fleet.score_all()
        elif action in ("step", "fail") and len(consumption.buffer) >= 2:
            waiting = asyncio.create_task(fleet.scheduler.next_batch(groups=2, version=version))
            await asyncio.wait([waiting], timeout=0)
            if not waiting.done():  # what there was is too old
                waiting.cancel()
                continue
            batch = waiting.result()
            if action == "step":
                step += 1
                await consumption.commit(batch, step)
            else:
                await consumption.put_back(batch)
        elif action == "die":
            await consumption.roll_back(0)
            step = 0
        elif action == "publish":
            version += 1
            fleet.learned(version)
        assert_law_one(fleet)


async def lengths_through(fleet, *, steps, groups, ready, seed):
    """Response lengths of each step and of all that was issued, when a token takes one unit of time.

    Admission keeps a number of groups live, so short trajectories finish, and are replaced, first. The learner
    takes `groups` whenever `ready` are there.
    """
    rng = np.random.default_rng(seed)
    issued, consumed, running, now = [], [], [], 0.0
    known = set()
    while len(consumed) < steps:
        await fleet.report(0)
        for id in fleet.running[0].keys() - known:
            known.add(id)
            issued.append(int(np.clip(20 * np.exp(0.99 * rng.standard_normal()), 1, MAX_TOKENS - 3)))
            heapq.heappush(running, (now + issued[-1], id, issued[-1]))
        now, id, length = heapq.heappop(running)
        await fleet.finish(0, id, tokens=length)
        await fleet.score_all()
        if len(fleet.scheduler.consumption.buffer) >= ready:
            batch = await take(fleet, groups, version=len(consumed))
            consumed.append(batch)
            await fleet.scheduler.consumption.commit(batch, len(consumed))
            fleet.versions[0] = len(consumed)
    return consumed, issued


def response_lengths(batches):
    return [trajectory.length for batch in batches for trajectory in batch.trajectories]


def equally_distributed(some, all_of_them):
    """Whether the quantiles agree within what sampling explains, at the 1 % level each."""
    for q in (0.1, 0.5, 0.9, 0.97):
        margin = 2.58 * np.sqrt(q * (1 - q) / len(some))
        low, high = np.quantile(all_of_them, [max(0.0, q - margin), min(1.0, q + margin)])
        if not low <= np.quantile(some, q) <= high:
            return False
    return True


async def test_quantiles_of_consumed_lengths_equal_those_of_issued_ones():
    fleet = make_fleet(groups=8, capacity=40)
    consumed, issued = await lengths_through(fleet, steps=200, groups=8, ready=16, seed=3)
    settled = response_lengths(consumed[10:])
    assert equally_distributed(settled, issued)
    assert not equally_distributed(response_lengths(consumed[:3]), issued), "at first short ones come alone"
    assert not equally_distributed(sorted(settled)[: int(0.97 * len(settled))], issued), "the longest are missed"


async def test_a_deadline_that_comes_in_the_midst_of_a_commit_drops_nothing_of_it(monkeypatch):
    monkeypatch.setattr(consumption_module, "COMMITTED_AT_ONCE", 1)
    fleet = make_fleet(group_deadline_s=10.0)
    await make_ready(fleet, [5, 6, 7, 8])
    batch = await take(fleet, 4)
    fleet.clock.time = 60.0
    committing = asyncio.create_task(fleet.scheduler.consumption.commit(batch, 1))
    while not committing.done():
        await fleet.scheduler.incoming.enforce_deadlines()
        await asyncio.sleep(0)
    committing.result()
    assert sum(isinstance(event, Consumed) for event in fleet.log.events) == 8
    assert not reasons(fleet)


async def test_what_is_uncut_is_done_before_who_was_cancelled_goes_on():
    did = []

    async def work():
        await asyncio.sleep(0.05)
        did.append("work")

    async def call():
        try:
            await finish_despite_cancel(work())
        except asyncio.CancelledError:
            did.append("cancelled")
            raise

    calling = asyncio.create_task(call())
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait([calling])
    assert did == ["work", "cancelled"]
    assert calling.cancelled()
