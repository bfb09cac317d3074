"""Actors that others of a run find by name, over deaths of their processes."""

import asyncio
import os

import pytest

from laminar_py.runtime.cluster.backend import NamedPart, open_cluster
from laminar_py.runtime.cluster.errors import RemoteCallError
from laminar_py.runtime.cluster.part import Part

PATIENCE_S = 60.0


class Echo:
    """Answers what it is asked, dies over `die` once, and makes mistakes."""

    async def echo(self, data):
        return data

    async def pid(self, data):
        return str(os.getpid()).encode()

    async def hold(self, data):
        await asyncio.sleep(PATIENCE_S)
        return data

    async def err(self, data):
        raise ValueError("a mistake of ours")


@pytest.fixture(scope="module", params=[None, "local"], ids=["forked", "ray"])
def cluster(request):
    with open_cluster(request.param):
        yield


def start(name):
    return Part("echo", Echo, concurrency=1_000_000, timeout_s=PATIENCE_S, known_as=name)


async def test_one_that_dies_is_asked_again_under_its_name(cluster):
    part, actor = start("run.1.echo-0"), NamedPart("run.1.echo-0")
    before = await actor.call("pid", b"")
    asked = asyncio.create_task(actor.call("hold", b"x"))
    await asyncio.sleep(0.2)
    os.kill(int(before), 9)
    await asyncio.sleep(0.5)
    assert not asked.done(), "it waits for the next"
    asked.cancel()
    part.kill()  # as its keeper does, which frees the name
    part = start("run.1.echo-0")
    async with asyncio.timeout(PATIENCE_S):
        assert await actor.call("echo", b"y") == b"y"
        assert await actor.call("pid", b"") != before
    part.kill()


async def test_whoever_asks_before_there_is_one_waits(cluster):
    actor = NamedPart("run.1.echo-1")
    asked = [asyncio.create_task(actor.call("echo", bytes([number]))) for number in range(50)]
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in asked)
    part = start("run.1.echo-1")
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*asked) == [bytes([number]) for number in range(50)]
    part.kill()


async def test_a_mistake_in_it_is_raised_and_not_waited_over(cluster):
    part, actor = start("run.1.echo-2"), NamedPart("run.1.echo-2")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RemoteCallError, match="a mistake of ours"):
            await actor.call("err", b"")
    part.kill()
