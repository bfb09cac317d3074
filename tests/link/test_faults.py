"""Random faults on the way between hub and replicas: nothing is lost, doubled or out of order at either end."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from laminar_py.runtime.link import hub as hub_module
from laminar_py.runtime.link import replica_link
from laminar_py.runtime.link.messages import CallOff, Submit
from tests.link.ends import Commands, linked, make_assignment, make_report, proxied, serving

NUM_REPLICAS, NUM_REPORTS, NUM_ORDERS, NUM_FAULTS = 3, 60, 60, 25


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Whatever was lost is said again soon."""
    monkeypatch.setattr(hub_module, "RESEND_S", 0.3)
    monkeypatch.setattr(hub_module, "CHECK_S", 0.05)
    monkeypatch.setattr(replica_link, "RESEND_S", 0.1)


async def _report(replica, rng):
    for number in range(1, NUM_REPORTS + 1):
        replica.reports.put_nowait(make_report(number))
        await asyncio.sleep(rng.uniform(0, 0.03))


async def _command(connection, rng):
    """Commands of all sizes: some fill frames, most do not."""
    for number in range(1, NUM_ORDERS + 1):
        size = rng.choice([1, 1, 1, 1000, 200_000])
        name = str(number)
        connection.send_command(
            CallOff([name]) if size == 1 else Submit([make_assignment(name, prompt=[0] * size)])
        )
        await asyncio.sleep(rng.uniform(0, 0.03))


async def _fail(proxies, rng):
    for _ in range(NUM_FAULTS):
        await rng.choice(proxies).fail(rng)
        await asyncio.sleep(rng.uniform(0, 0.1))


@pytest.mark.parametrize("seed", range(6))
async def test_no_fault_on_the_way_loses_doubles_or_reorders_anything(seed):
    rng = random.Random(seed)
    async with serving() as desk, AsyncExitStack() as stack:
        labels = [f"replica-{index}-1-{index}" for index in range(NUM_REPLICAS)]
        connections = [desk.hub.open(label, index) for index, label in enumerate(labels)]
        replicas = [Commands() for _ in labels]
        proxies = [await stack.enter_async_context(proxied(desk.hub.endpoint)) for _ in labels]
        for label, replica, proxy in zip(labels, replicas, proxies, strict=True):
            await stack.enter_async_context(linked(proxy.endpoint, label, replica, quiet_s=0.2))
        asking = asyncio.create_task(_ask(connections, rng))
        await asyncio.gather(
            _fail(proxies, rng),
            *(_report(replica, rng) for replica in replicas),
            *(_command(connection, rng) for connection in connections),
        )
        asked = await asking
        await desk.until(lambda: all(len(desk.of(label)) >= NUM_REPORTS for label in labels))
        while any(connection._unacknowledged for connection in connections):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for label, replica in zip(labels, replicas, strict=True):
        assert desk.of(label) == list(range(1, NUM_REPORTS + 1))
        assert [int(name) for _, name in replica.did] == list(range(1, NUM_ORDERS + 1))
    assert all(answer is not None for answer in asked)
    assert sum(proxy.cuts for proxy in proxies) >= 10


async def _ask(connections, rng):
    """Surveys meanwhile, each of which is answered."""
    answers = []
    for _ in range(10):
        answers.append(await rng.choice(connections).request_survey())
        await asyncio.sleep(rng.uniform(0, 0.05))
    return answers
