"""Replay: the pool is what the record says, a draw repeats, and a step's replays are events of their own."""

import asyncio
import tempfile
from collections import Counter
from functools import partial
from operator import sub
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_lab.audit.verify import verify
from laminar_py.config.replay import ReplayBy, ReplayConfig
from laminar_py.control.replay import PooledGroup, ReplayPool
from laminar_py.control.steps import step_events
from laminar_py.learner.packing.buffer import Packing
from laminar_py.ledger.database import segments_path
from laminar_py.ledger.recovery import recover
from laminar_py.records.columns import Column
from laminar_py.records.events import Checkpointed, Consumed, Replayed, RolledBack
from laminar_py.records.trajectory import FinishReason
from tests.builders import make_finished
from tests.control.fleet import Fleet
from tests.depth import examples
from tests.ledger.runs import begin, open_ledger, publish
from tests.telemetry.rows import make_row

CAPACITY, MOST, MAX_AGE, WANTED = 4, 2, 3, 2


def make_pool(*, by=ReplayBy.UNIFORM, seed=0, capacity=CAPACITY, most=MOST, max_age=MAX_AGE, wanted=WANTED):
    config = ReplayConfig(share=0.5, by=by, capacity=capacity, most=most, max_age=max_age)
    return ReplayPool(config, wanted=wanted, seed=seed)


def group(number, *, step=0, rewards=(0.0, 1.0), version=0):
    members = [
        make_finished(f"g{number}.{place}", reward=reward, version=version) for place, reward in enumerate(rewards)
    ]
    return PooledGroup(id=f"g{number}", step=step, members=members)


def filled(pool, rewards):
    for number, reward in enumerate(rewards):
        pool.add(group(number, rewards=(reward, reward)))
    return pool


def drawn(pool, *, steps):
    """How often each of the groups is drawn over so many steps."""
    return Counter(one.id for step in range(1, steps + 1) for one in pool.draw(step, age_of=lambda version: 0))


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["step", "step", "step", "checkpoint", "die"]), st.integers(0, 3)), max_size=40
)


@settings(max_examples=examples(100), deadline=None)
@given(ACTIONS, st.sampled_from(ReplayBy))
def test_the_pool_is_a_function_of_steps_that_no_rollback_undid(actions, by):
    """Against a model without limits: all consumed groups and all replays, cut to the checkpoint at a death."""
    pool, consumed, replays = make_pool(by=by), [], []
    step = saved = number = 0
    for action, count in actions:
        if action == "step":
            again = pool.draw(step + 1, age_of=partial(sub, step))
            step += 1
            pool.record(again, step)
            for _ in range(count):
                consumed.append((f"g{number}", step))
                pool.add(group(number, step=step, version=step - 1))
                number += 1
            replays += [(one.id, step) for one in again]
            assert len(again) <= WANTED
            assert len({one.id for one in again}) == len(again)
            assert all(one.age(partial(sub, step - 1)) <= MAX_AGE for one in again)
        elif action == "checkpoint":
            saved = step
            pool.checkpointed(saved)
        else:
            step = saved
            pool.roll_back(saved)
            consumed = [(id, at) for id, at in consumed if at <= saved]
            replays = [(id, at) for id, at in replays if at <= saved]
        used = {id: [at for of, at in replays if of == id] for id, _ in consumed}
        expected = [(id, used[id]) for id, _ in consumed[-CAPACITY:] if len(used[id]) < MOST]
        assert [(one.id, one.replays) for one in pool.groups] == expected


def test_a_draw_follows_from_pool_seed_and_step_alone():
    def draws(seed):
        pool = filled(make_pool(seed=seed, capacity=64, wanted=4), [0.0] * 64)
        return [[one.id for one in pool.draw(step, age_of=lambda version: 0)] for step in range(8)]

    assert draws(0) == draws(0)
    assert draws(0) != draws(1)
    assert len(set(map(tuple, draws(0)))) == 8


def test_groups_beyond_the_bound_are_not_drawn_and_stay():
    pool = filled(make_pool(), [0.0] * CAPACITY)
    assert not pool.draw(9, age_of=lambda version: MAX_AGE + 1)
    assert len(pool.draw(9, age_of=lambda version: MAX_AGE)) == WANTED


def test_a_group_is_as_old_as_its_most_stale_member():
    """Version 2 is of steps that a rollback undid, so it is older than version 1."""
    pool, one = make_pool(), group(0)
    one.members[1] = make_finished("g0.1", version=2)
    pool.add(one)
    assert pool.draw(1, age_of={0: 1, 2: MAX_AGE}.__getitem__) == [one]
    assert pool.draw(1, age_of={0: 1, 2: MAX_AGE + 1}.__getitem__) == []


def test_priorities():
    rewards = [0.0, 1.0, 0.0, 0.0]
    uniform = drawn(filled(make_pool(most=9999), rewards), steps=600)
    assert min(uniform.values()) > 240, "of 1,200 draws each has about 300"
    by_reward = drawn(filled(make_pool(by=ReplayBy.REWARD), rewards), steps=600)
    assert by_reward.most_common(1)[0][0] == "g1"
    assert by_reward["g3"] > by_reward["g2"] > by_reward["g0"], "of equal rewards the last"
    by_recency = drawn(filled(make_pool(by=ReplayBy.RECENCY), rewards), steps=600)
    assert [id for id, _ in by_recency.most_common()] == ["g3", "g2", "g1", "g0"]


def test_a_group_that_lost_tokens_leaves_as_a_whole():
    pool = filled(make_pool(), [0.0] * 3)
    assert pool.drop({"g1.1", "g9.0"}) == ["g1"]
    assert [one.id for one in pool.groups] == ["g0", "g2"]


def test_a_resume_that_finds_lost_tokens_late_draws_what_the_run_would_have_drawn():
    """The pool of a resumed run has a lost group again, until a step that draws it cannot read it."""
    rewards = [0.0, 1.0] * 8
    pools = [filled(make_pool(by=ReplayBy.REWARD, capacity=12, most=9), rewards) for _ in range(2)]
    earlier, resumed = pools
    earlier.drop({"g9.0", "g7.1"})
    for step in range(1, 20):
        drawn = []
        for pool in pools:
            groups = pool.draw(step, age_of=lambda version: 0)
            while lost := {"g9.0", "g7.1"} & {member.id for group in groups for member in group.members}:
                pool.drop(lost)
                groups = pool.draw(step, age_of=lambda version: 0)
            pool.record(groups, step)
            drawn.append([group.id for group in groups])
        assert drawn[0] == drawn[1]
    assert resumed.drop({"g9.1"}) == [], "some step met it"


# ---- with the rest of the control plane


def make_fleet(**kwargs):
    """One replica; a step has two new groups of two, and up to two replayed ones."""
    replay = ReplayConfig(share=0.5, capacity=CAPACITY, most=MOST, max_age=MAX_AGE)
    return Fleet(replicas=1, group_size=2, batch=2, capacity=8, replay=replay, replayed_groups=WANTED, **kwargs)


async def take(fleet):
    """A batch of two groups that the replica makes now."""
    while len(fleet.scheduler.consumption.buffer) < 2:
        await fleet.report(0)
        await fleet.finish_all(0)
        await fleet.score_all()
    async with asyncio.timeout(5):
        return await fleet.scheduler.next_batch(groups=2, version=fleet.scheduler.state.newest_version)


async def make_step(fleet):
    """A step, which publishes a version; returns its batch."""
    batch, state = await take(fleet), fleet.scheduler.state
    step = state.ages.last_step + 1
    await fleet.scheduler.consumption.commit(batch, step)
    for event in step_events(make_row(step), batch, incarnation=1, skipped=0):
        fleet.log.append(event)
    version = state.newest_version + 1
    if not hasattr(fleet.log, "events"):
        publish(fleet.log, version)
    fleet.scheduler.published(version)
    fleet.versions[0] = version
    return batch


def pool_of(fleet):
    pool = fleet.scheduler.consumption._pool
    return [(one.id, one.step, tuple(one.replays), list(map(described, one.members))) for one in pool.groups]


def described(member):
    return member.id, member.tokens, member.spans, member.weight, member.advantage, member.num_trained


async def test_a_step_waits_for_its_new_groups_only_and_replays_what_earlier_steps_consumed():
    fleet = make_fleet()
    batches = []
    for step in range(1, 4):
        batches.append(await make_step(fleet))
        fleet.scheduler.consumption.checkpointed(step)  # so that only the pool refers to what was consumed
    assert [len(batch.groups) for batch in batches] == [2, 2, 2]
    assert [len(batch.replayed) for batch in batches] == [0, 2, 2]
    assert [batch.num_fresh for batch in batches] == [4, 4, 4]
    again = {member.id for one in batches[1].replayed for member in one.members}
    assert again == {trajectory.id for trajectory in batches[0].trajectories}
    replays = [event for event in fleet.log.events if isinstance(event, Replayed)]
    assert [event.step for event in replays] == [2] * 4 + [3] * 4
    assert {event.staleness for event in replays if event.step == 2} == {1}
    account = fleet.log.machine.accounting().train
    assert (account.consumed, account.replayed, account.balanced) == (12, 8, True)


async def test_a_batch_that_is_put_back_has_replayed_nothing():
    fleet = make_fleet()
    await make_step(fleet)
    before, batch = pool_of(fleet), await take(fleet)
    await fleet.scheduler.consumption.put_back(batch)
    assert pool_of(fleet) == before
    again = await take(fleet)
    assert [one.id for one in again.replayed] == [one.id for one in batch.replayed]


async def test_lost_tokens_of_a_replay_end_no_run():
    fleet = make_fleet()
    await make_step(fleet)
    batch = await take(fleet)
    lost = batch.replayed[0]
    await fleet.scheduler.consumption.put_back(batch)
    await fleet.scheduler.incoming.drop_lost({lost.members[0].id: "its segment is gone"})
    again = await take(fleet)
    assert lost.id not in {one.id for one in again.replayed}
    assert len(again.groups) == 2


async def test_a_masked_response_is_replayed_as_masked():
    fleet = make_fleet(masks_truncated=True)
    await fleet.report(0)
    for place, id in enumerate(list(fleet.running[0])):
        await fleet.finish(0, id, reason=FinishReason.STOP if place % 2 else FinishReason.LENGTH)
    await fleet.score_all()
    await make_step(fleet)
    batch = await take(fleet)
    await fleet.scheduler.consumption.commit(batch, 2)
    weights = {event.trajectory_id: event.weight for event in fleet.log.events if isinstance(event, Replayed)}
    first = {event.trajectory_id: event.weight for event in fleet.log.events if isinstance(event, Consumed)}
    assert set(weights.values()) == {0.0, 1.0}
    assert all(first[id] == weight for id, weight in weights.items())


HISTORIES = st.lists(st.sampled_from(["step", "step", "step", "save", "die"]), min_size=1, max_size=12)


@settings(max_examples=examples(30), deadline=None)
@given(HISTORIES)
def test_a_resume_rebuilds_the_pool_and_every_law_holds_under_rollbacks(history):
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(history, Path(folder)))


async def play(history, run):
    async with open_ledger(run) as ledger:
        begin(ledger, versions=(0,))
        fleet = make_fleet(recorder=ledger, segments=segments_path(run))
        consumption, saved = fleet.scheduler.consumption, 0
        kept = pool_of(fleet)  # at the checkpoint
        for action in history:
            if action == "step":
                await make_step(fleet)
            elif action == "save":
                saved = fleet.scheduler.state.ages.last_step
                ledger.append(
                    Checkpointed(step=saved, version=saved, path=f"checkpoints/{saved}", stall_s=0, elapsed_s=0)
                )
                consumption.checkpointed(saved)
                kept = pool_of(fleet)
            else:
                ledger.append(RolledBack(saved, "learner_crashed"))
                await consumption.roll_back(saved)
                assert pool_of(fleet) == kept
            await ledger.commit()
            assert verify(run) == []
            account = ledger.accounting().train
            assert account.balanced
            recovered = recover(run, kept=CAPACITY)
            other = make_fleet()
            other.scheduler.consumption.restore_pool(recovered.consumed)
            assert pool_of(other) == kept
    async with open_ledger(run) as ledger:
        assert ledger.accounting().train == account


async def test_a_resume_reads_no_row_again_and_leaves_out_what_it_cannot_train_on(tmp_path, monkeypatch):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0,))
        fleet = make_fleet(recorder=ledger, segments=segments_path(tmp_path))
        consumed = [group.group_id for _ in range(2) for group in (await make_step(fleet)).groups]
        ledger.append(Checkpointed(step=2, version=2, path="checkpoints/2", stall_s=0, elapsed_s=0))
    groups = recover(tmp_path, kept=CAPACITY).consumed
    longest = max(member.as_ref().num_tokens for group in groups for member in group.members)

    def usable(**kwargs):
        other = make_fleet(**kwargs)
        other.scheduler.consumption.restore_pool(recover(tmp_path, kept=CAPACITY).consumed)
        return [id for id, *_ in pool_of(other)]

    assert usable() == consumed[-CAPACITY:]
    assert usable(scored_columns=(Column(name="hints"),)) == []
    assert usable(packing=Packing(max_tokens=longest)) == consumed[-CAPACITY:]
    assert usable(packing=Packing(max_tokens=longest - 1)) != consumed[-CAPACITY:]
    async with open_ledger(tmp_path) as ledger:
        monkeypatch.setattr(ledger.machine, "_recall", lambda id: pytest.fail(f"{id} is read again"))
        other = make_fleet(recorder=ledger)
        other.scheduler.consumption.restore_pool(groups)
        ids = [member.id for group in groups for member in group.members]
        del groups
        assert all(ledger.machine.find_consumed(id) is not None for id in ids)


@pytest.mark.parametrize("kept", [0, 1])
async def test_a_recovery_reads_no_more_groups_than_may_be_replayed(tmp_path, kept):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0,))
        fleet = make_fleet(recorder=ledger, segments=segments_path(tmp_path))
        for _ in range(2):
            await make_step(fleet)
        ledger.append(Checkpointed(step=2, version=2, path="checkpoints/2", stall_s=0, elapsed_s=0))
    assert len(recover(tmp_path, kept=kept).consumed) == kept
