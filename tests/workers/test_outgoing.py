"""How messages leave that nobody waits for."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from laminar_py.records.codec import decode
from laminar_py.workers.outgoing import Outgoing

PATIENCE_S = 10.0


class Receiver:
    """Stands for a part; tells a queue what it is sent, and by which thread."""

    def __init__(self, name, got):
        self.name, self.got = name, got
        self.loop = asyncio.get_running_loop()

    def send(self, method, argument):
        what = (self.name, method, argument, threading.current_thread())
        self.loop.call_soon_threadsafe(self.got.put_nowait, what)


@asynccontextmanager
async def sending():
    """Messages that are being sent, and what parts "a" and "b" have got of them."""
    outgoing, got = Outgoing(), asyncio.Queue()
    task = asyncio.create_task(outgoing.run())
    async with asyncio.timeout(PATIENCE_S):
        yield outgoing, Receiver("a", got), Receiver("b", got)
    task.cancel()


async def test_messages_leave_in_the_order_in_which_they_were_put_off_the_event_loop():
    async with sending() as (outgoing, *parts):
        for number in range(40):
            outgoing.put(parts[number % 2], "submit", [str(number)])
            if number % 7 == 0:
                await asyncio.sleep(0)
        got = [await parts[0].got.get() for _ in range(40)]
    said = [(name, decode(list[str], data)) for name, _, data, _ in got]
    assert said == [("ab"[number % 2], [str(number)]) for number in range(40)]
    (thread,) = {thread for *_, thread in got}
    assert thread is not threading.current_thread()


async def test_a_flag_is_sent_as_it_is():
    async with sending() as (outgoing, part, _):
        outgoing.put(part, "stop", True)
        assert (await part.got.get())[:3] == ("a", "stop", True)


async def test_what_cannot_be_sent_ends_the_loop_with_its_own_error():
    outgoing = Outgoing()
    outgoing.put(Receiver("a", asyncio.Queue()), "submit", object())
    with pytest.raises(TypeError, match="cannot encode object"):
        await outgoing.run()
