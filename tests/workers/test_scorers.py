"""Servers that the run launches for terms of the reward."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from laminar_py.config.loading import load_config
from laminar_py.records.codec import decode, encode
from laminar_py.records.scoring import ServerAddress
from laminar_py.runtime.cluster.errors import PartCrashedError, RunFailedError
from laminar_py.runtime.cluster.placement import NodeSlot
from laminar_py.runtime.workers.scorers import RewardServers
from laminar_py.runtime.workers.specs import ServerStart
from tests.runs.runs import REPO
from tests.workers.fakes import Processes, make_incarnation

PATIENCE_S = 60.0
POOLS = "servers: {prm: {model: /m, count: 2}}"
TERM = "{kind: steps, servers: prm, separator_id: 7, labels: [5, 6]}"


class Nodes:
    """A plan with both servers on one node, which stays as it is."""

    plan = SimpleNamespace(servers=(NodeSlot("node-0", 1), NodeSlot("node-0", 1)))

    async def refresh(self, *, age_s=0.0):
        await asyncio.sleep(0)

    def ip(self, node):
        return "10.0.0.4"


class Launched:
    """A server that has a port of its own in each life, or never starts."""

    ports = 0
    fails = False

    def pid(self):
        return 7

    def start(self, data):
        if Launched.fails:
            raise PartCrashedError("server-prm-0", "EngineLostError: no memory")
        Launched.ports += 1
        return encode(ServerAddress(f"http://{decode(ServerStart, data).host}:{Launched.ports}", "k"))

    async def watch(self, wait_s):
        await asyncio.Event().wait()


def make_servers(monkeypatch, told: asyncio.Queue) -> tuple[RewardServers, Processes]:
    monkeypatch.setattr(Launched, "ports", 0)
    processes = Processes(monkeypatch, lambda name: Launched())
    config = load_config(REPO / "configs/quickstart.yaml", [f"reward={{{POOLS}, use: [{TERM}]}}"])
    run = SimpleNamespace(path=Path("runs/x-1"))
    incarnation = make_incarnation(config=config, run=run, placement=Nodes())
    return RewardServers(incarnation, publish=told.put_nowait), processes


async def test_scorers_hear_of_each_server_that_comes_up_and_of_each_that_is_gone(monkeypatch):
    told = asyncio.Queue()
    servers, processes = make_servers(monkeypatch, told)
    async with asyncio.timeout(PATIENCE_S):
        keeping = asyncio.create_task(servers.keep())
        first = await processes.next()
        while sum(map(len, (await told.get()).pools.values())) < 2:
            pass
        first.die()
        gone, back = await told.get(), await told.get()
        keeping.cancel()
    assert [one.url for one in gone.pools["prm"]] == ["http://10.0.0.4:2"]
    assert {one.url for one in back.pools["prm"]} == {"http://10.0.0.4:2", "http://10.0.0.4:3"}
    assert gone.number < back.number


async def test_a_server_that_never_starts_ends_the_run_with_one_line(monkeypatch):
    monkeypatch.setattr(Launched, "fails", True)
    servers, _ = make_servers(monkeypatch, asyncio.Queue())
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ExceptionGroup) as caught:
            await servers.keep()
    error = caught.value.exceptions[0]
    assert isinstance(error, RunFailedError)
    assert str(error).startswith("server-prm-")
    assert "does not start: EngineLostError: no memory; see logs/server-prm-" in str(error)
