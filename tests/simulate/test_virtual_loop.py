"""Virtual time: it passes at once, in order, and threads take none of it."""

import asyncio
import time

import pytest

from laminar_py.simulate.virtual_loop import LoopClock, virtually


def test_a_day_passes_at_once_and_timers_fire_in_order():
    fired = []

    async def after(seconds):
        await asyncio.sleep(seconds)
        fired.append((seconds, LoopClock().now()))

    async def lead():
        await asyncio.gather(after(80_000.0), after(3.0), after(5.0))

    began = time.monotonic()
    virtually(lead())
    assert fired == [(3.0, 3.0), (5.0, 5.0), (80_000.0, 80_000.0)]
    assert time.monotonic() - began < 60


def test_work_for_a_thread_is_done_on_the_spot_with_its_error():
    async def lead():
        answer = await asyncio.to_thread(sum, [1, 2])
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        return answer, LoopClock().now()

    assert virtually(lead()) == (3, 0.0)


def test_a_coroutine_that_takes_longer_than_it_may_is_told():
    with pytest.raises(TimeoutError):
        virtually(asyncio.sleep(11.0), limit_s=10.0)
