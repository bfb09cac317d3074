"""When acts happen that several ask for."""

import asyncio

import pytest

from laminar_lab.simulate.virtual_loop import virtually
from laminar_py.control.dispatcher import Throttle

EVERY_S = 0.02


def acts_of(*asked):
    """Times at which it acts; asked for are waits in seconds and names of methods, one after another."""

    async def play():
        loop, acts = asyncio.get_running_loop(), []
        tick = Throttle(lambda: acts.append(loop.time()), every_s=EVERY_S)
        running = asyncio.create_task(tick.run())
        for what in asked:
            if isinstance(what, str):
                getattr(tick, what)()
            else:
                await asyncio.sleep(what)
        await asyncio.sleep(1.0)
        running.cancel()
        return acts

    return pytest.approx(virtually(play()))


def test_the_first_wake_is_answered_at_once():
    assert acts_of("wake") == [0.0]


def test_wakes_that_come_together_are_answered_by_one_act():
    wakes = ["wake", 0.001] * 15
    assert acts_of(*wakes) == [0.0, EVERY_S]


def test_at_any_rate_of_wakes_it_acts_at_most_once_in_an_interval():
    acts = acts_of(*["wake", 0.001] * 400)
    assert len(acts.expected) == pytest.approx(400 * 0.001 / EVERY_S, abs=1)


def test_an_act_at_once_answers_all_that_had_asked():
    assert acts_of("wake", 0.005, "wake", 0.005, "run_now") == [0.0, 0.01]


def test_after_an_act_at_once_an_interval_begins():
    assert acts_of("run_now", 0.005, "wake") == [0.0, EVERY_S]


async def test_what_an_act_raises_ends_the_loop():
    def act():
        raise ValueError("of its own")

    tick = Throttle(act, every_s=EVERY_S)
    tick.wake()
    with pytest.raises(ValueError, match="of its own"):
        await tick.run()
