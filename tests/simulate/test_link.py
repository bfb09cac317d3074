"""Orders, reports, questions and answers: each way keeps their order, in its time."""

import asyncio
from functools import partial

from laminar_lab.simulate.link import OneWay
from laminar_lab.simulate.virtual_loop import virtually


def test_what_is_sent_arrives_in_its_order_so_much_later():
    arrived = []

    async def arrive(name):
        arrived.append((name, asyncio.get_running_loop().time()))

    async def lead():
        way = OneWay(0.5)
        carrying = asyncio.create_task(way.run())
        for name in "abc":
            way.send(partial(arrive, name))
        await asyncio.sleep(0.25)
        way.send(partial(arrive, "d"))
        await asyncio.sleep(1.0)
        carrying.cancel()

    virtually(lead())
    assert arrived == [("a", 0.5), ("b", 0.5), ("c", 0.5), ("d", 0.75)]
