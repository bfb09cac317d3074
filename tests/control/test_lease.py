"""Turns on shared devices: who computes, when a learner with a batch gets its turn, and what is on record."""

import asyncio

import pytest

from laminar_lab.simulate.virtual_loop import LoopClock, virtually
from laminar_py.config.cluster import LeaseConfig, LeaseSwitch
from laminar_py.control.lease import DeviceLease, Holder


class Fleet:
    """Shared replicas that take `takes_s` to stop and to go on, and have `running` trajectories."""

    def __init__(self, *, takes_s=0.0, running=0):
        self.takes_s, self.running = takes_s, running
        self.computes = True
        self.stopping = False

    async def hold(self):
        self.stopping = True
        await asyncio.sleep(self.takes_s)
        self.computes = False

    async def release(self):
        self.computes, self.stopping = True, False
        await asyncio.sleep(self.takes_s)

    def load(self):
        return self.running, 100 * self.running


def lease_of(fleet, **settings):
    record = []
    made = DeviceLease(fleet, LeaseConfig(**settings), clock=LoopClock(), record=record.append)
    return made, record


def test_without_shared_devices_the_learner_never_waits_and_nothing_is_recorded():
    async def story():
        lease, record = lease_of(None)
        await lease.give(0)
        await lease.take(0)
        assert record == []

    virtually(story())


def test_a_run_begins_with_the_learner_and_each_hand_over_is_recorded_with_its_time():
    async def story():
        fleet = Fleet(takes_s=0.25, running=10)
        lease, record = lease_of(fleet)
        assert lease.holder is Holder.LEARNER
        await lease.take(0)  # its own already
        await lease.give(0)
        assert fleet.computes
        await lease.take(3)
        assert not fleet.computes
        told = [(event.holder, event.step, event.tokens) for event in record]
        assert told == [("replicas", 0, 1000), ("learner", 3, 1000)]
        assert [event.elapsed_s for event in record] == pytest.approx([0.25, 0.25])

    virtually(story())


@pytest.mark.parametrize("switch", LeaseSwitch)
def test_a_learner_with_a_batch_gets_its_turn_once_few_trajectories_run(switch):
    async def story():
        fleet = Fleet(takes_s=1.0, running=64)
        lease, _ = lease_of(fleet, switch=switch, most_cost=0.001)
        await lease.give(0)
        take = asyncio.create_task(lease.take(1))
        await asyncio.sleep(5)
        assert fleet.computes
        fleet.running = 32
        await asyncio.sleep(0.2)
        await asyncio.sleep(1.0)
        assert take.done()
        assert not fleet.computes

    virtually(story())


def test_ready_takes_the_devices_as_soon_as_hand_overs_cost_no_more_than_their_share():
    async def story():
        fleet, clock = Fleet(takes_s=0.5, running=64), LoopClock()
        lease, _ = lease_of(fleet, switch=LeaseSwitch.READY, most_cost=0.1)
        await lease.give(0)  # 0.5 s: of the first turn only one hand-over is known
        began = clock.now()
        await lease.take(1)
        assert clock.now() - began == pytest.approx(5.0 + 0.5, abs=0.2)
        await lease.give(1)  # a whole turn costs 1 s
        began = clock.now()
        await lease.take(2)
        assert 5.0 < clock.now() - began < 11.0

    virtually(story())


def test_tail_waits_as_long_as_most_trajectories_run():
    async def story():
        fleet = Fleet(running=64)
        lease, _ = lease_of(fleet, switch=LeaseSwitch.TAIL)
        await lease.give(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await lease.take(1)
        assert fleet.computes
        await lease.take(1, at_once=True)  # a learner that restarts
        assert not fleet.computes

    virtually(story())


@pytest.mark.parametrize("moment", ["it waits for its turn", "replicas stop"])
def test_a_take_that_is_cancelled_leaves_the_replicas_their_turn(moment):
    async def story():
        fleet = Fleet(takes_s=0.5, running=10)
        lease, record = lease_of(fleet)
        await lease.give(0)
        take = asyncio.create_task(lease.take(1, at_once=moment == "replicas stop"))
        await asyncio.sleep(0.3)
        assert fleet.stopping == (moment == "replicas stop")
        take.cancel()
        await asyncio.wait([take])
        assert take.cancelled()
        assert fleet.computes
        assert not fleet.stopping
        assert lease.holder is Holder.REPLICAS
        assert len(record) == 1

    virtually(story())


def test_a_learner_that_dies_as_it_gives_the_devices_back_asks_for_them_again():
    async def story():
        fleet = Fleet(takes_s=5.0, running=10)
        lease, record = lease_of(fleet)
        give = asyncio.create_task(lease.give(1))
        await asyncio.sleep(1.0)
        give.cancel()
        await asyncio.wait([give])
        assert fleet.computes
        await lease.take(1, at_once=True)
        assert not fleet.computes
        assert [event.holder for event in record] == ["replicas", "learner"]

    virtually(story())
