"""Virtual time: it passes at once, in order, and threads take none of it."""

import asyncio
import time

import pytest

from laminar_lab.simulate.virtual_loop import LoopClock, virtually


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


@pytest.mark.parametrize("others", [[], [0.5, 2.0], [1.0 - 1e-9, 1.0, 1.0 + 1e-9, 3.0]])
def test_timers_of_a_moment_fire_as_they_were_set_and_on_time_whatever_others_there_are(others):
    fired = []

    async def lead():
        loop = asyncio.get_running_loop()
        for seconds in others:
            loop.call_later(seconds, int)
        for place in range(20):
            loop.call_later(1.0 if place % 2 else 1 / 3, lambda place=place: fired.append((place, loop.time())))
        await asyncio.sleep(1.5)

    virtually(lead())
    assert [place for place, _ in fired] == [*range(0, 20, 2), *range(1, 20, 2)]
    (third, one) = sorted({at_s for _, at_s in fired})
    assert 1 / 3 <= third < 1 / 3 + 1e-8
    assert one == 1.0


def test_a_callback_that_fails_is_told_and_others_go_on():
    told, done = [], []

    async def lead():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: told.append(type(context["exception"])))
        loop.call_soon(lambda: 1 / 0)
        loop.call_later(1.0, lambda: done.append("a") or [][0])
        loop.call_later(1.0, done.append, "b")
        await asyncio.sleep(2.0)

    virtually(lead())
    assert (told, done) == ([ZeroDivisionError, IndexError], ["a", "b"])


def test_timers_that_were_cancelled_do_not_fire_however_many_and_others_do():
    fired = []

    async def lead():
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(1.0 + place / 1000, fired.append, place) for place in range(1000)]
        for timer in timers[::2]:
            timer.cancel()
        await asyncio.sleep(1.5)
        for timer in timers:
            timer.cancel()  # again, or after it has fired
        await asyncio.sleep(1.5)

    virtually(lead())
    assert fired == list(range(1, 500, 2))


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


def test_a_result_is_not_made_a_string_of():
    class Large:
        def __repr__(self) -> str:
            raise AssertionError("asked for a string of everything")

    async def make() -> Large:
        return Large()

    assert isinstance(virtually(make()), Large)


def test_timers_that_were_cancelled_neither_fire_nor_pile_up():
    fired = []

    async def lead():
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            loop.call_later(1e6, fired.append, "far").cancel()
            loop.call_later(0.5, fired.append, "near").cancel()
            await asyncio.sleep(0)
        await asyncio.sleep(1.0)
        return loop.time(), len(loop._timers)

    at_s, num_timers = virtually(lead())
    assert (at_s, fired) == (1.0, [])
    assert num_timers < 200
