"""Migration over a real scheduler, replicas and ledger: nothing is lost or doubled, versions stay whole."""

import asyncio
import itertools
from collections import Counter
from contextlib import AsyncExitStack
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from laminar_lab.audit.queries import accounting
from laminar_lab.audit.verify import verify
from laminar_lab.simulate.virtual_loop import virtually
from laminar_py.config.rollout import PLANNERS
from laminar_py.config.section import ConfigError
from laminar_py.control.views import ReplicaView
from laminar_py.engines.local.engine import LocalEngine
from laminar_py.engines.sglang.engine import SGLangEngine
from laminar_py.engines.sglang.stream import Served
from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import decode_event
from laminar_py.records.engine import GenerateRequest, SamplingParams
from laminar_py.repack.migration import choose
from tests.engines.engine_conformance import collect
from tests.engines.sglang.rig import make_model, running_server
from tests.learner.builders import make_model_folder
from tests.repack.house import SLOTS, House


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights")
    save_file({"w": torch.zeros(4)}, path / "model.safetensors")
    return path


def campaign(run, folder, *, moves, seed=0, kill_every_s=None, **settings):
    """A run until so many trajectories have moved; the house as it was left."""

    async def play():
        async with House(run, folder, seed=seed, **settings) as house:
            await house.run_until(lambda: house.moved >= moves, kill_every_s=kill_every_s)
            await house.quiet()
            return house

    return virtually(play())


def interruptions(run):
    with reading(run) as connection:
        rows = connection.execute("SELECT body FROM event WHERE kind = 'interrupted'")
        return [decode_event(body) for (body,) in rows]


def reasons(run):
    return Counter(event.reason for event in interruptions(run))


@pytest.mark.parametrize("planner", ["paper", "predictive"])
def test_nothing_is_lost_or_doubled(tmp_path, folder, planner):
    house = campaign(tmp_path, folder, moves=100, planner=planner)
    assert verify(tmp_path) == []
    assert reasons(tmp_path)["repacked"] > 0.8 * house.moved
    assert house.promises == 0, "no replica waits for what will not come"
    account = accounting(tmp_path).train
    assert sum(account.dropped.values()) == 0
    assert account.issued == account.consumed + account.live


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nor_when_replicas_die_at_any_moment_of_it(tmp_path, folder, seed):
    slow = seed != 1
    house = campaign(tmp_path, folder, moves=10_000 if slow else 500, seed=seed, kill_every_s=15.0)
    assert house.kills > 3
    assert house.num_salvaged > 0
    assert verify(tmp_path) == []
    account = accounting(tmp_path).train
    assert set(account.dropped) <= {"version_lost"}
    assert sum(account.dropped.values()) <= house.kills, (
        "only what no replica serves any more is lost, and issued anew"
    )
    assert account.issued == account.consumed + sum(account.dropped.values()) + account.live


class Failing:
    """A planner with a mistake."""

    def __init__(self, context):
        raise ValueError("planted")


def test_a_mistake_in_an_installed_planner_is_told_with_its_name(tmp_path, folder, monkeypatch):
    point = EntryPoint("failing", f"{__name__}:Failing", "laminar_py.planners")
    monkeypatch.setitem(vars(PLANNERS), "_announced", [point])
    with pytest.RaisesGroup(
        pytest.RaisesExc(
            ConfigError, match=r"^repack\.planner=failing: .*:Failing of .* raised ValueError: planted; fix"
        ),
        flatten_subgroups=True,
    ):
        campaign(tmp_path, folder, moves=1, planner="failing")


GREEDY = SamplingParams(
    max_new_tokens=300, temperature=0.0, stop_ids=tuple(range(2, 5))
)  # some stop early, most loop to the cap


async def greedy_run(run, folder, open_engine, *, count, **settings):
    """Until so many have finished after a move; each is what one that never moved would be."""
    async with House(
        run, folder, open_engine=open_engine, sampling=GREEDY, interval_s=0.05, pace=0.1, **settings
    ) as house:
        async with asyncio.timeout(240):
            await house.run_until(lambda: len(house.finished_after_a_move) >= count)
    engine = await open_engine()
    await engine.load_weights(folder, 10_000)
    for trajectory in house.finished_after_a_move:
        nothing = np.empty(0, np.int32)
        request = GenerateRequest(
            rid=trajectory.id,
            group_id=trajectory.id,
            prompt_ids=trajectory.prompt_ids,
            prefix_ids=nothing,
            sampling=GREEDY,
        )
        unmoved = (await collect(engine, request)).ids
        response = house.reader.load(trajectory.refs).response(trajectory.tokens)
        assert response.ids.tolist() == unmoved, trajectory.id
    await engine.close()
    assert verify(run) == []


@pytest.mark.slow
async def test_greedy_responses_of_the_embedded_engine_are_the_same_wherever_they_were_moved(tmp_path):
    folder = make_model_folder(tmp_path / "model")

    async def open_engine():
        engine = LocalEngine(folder, max_batch=SLOTS, max_len=400, kv_capacity=SLOTS * 400, stream_interval=8)
        await engine.start()
        return engine

    await greedy_run(tmp_path, folder, open_engine, replicas=3, count=10)


@pytest.mark.sglang
async def test_greedy_responses_of_sglang_are_the_same_wherever_they_were_moved(tmp_path):
    folder = make_model(tmp_path / "model", seed=0)
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(running_server(folder, tmp_path, log=tmp_path / f"sglang-{index}.log"))
            for index in range(2)
        ]
        turn = itertools.cycle(servers)

        async def open_engine():
            server = next(turn)
            served = Served(vocab=320, max_len=2040, experts_top_k=None, record=())
            engine = SGLangEngine(
                server.url, api_key=server.api_key, served=served, stall_timeout_s=60, watch_server=server.watch
            )
            await engine.start()
            return engine

        await greedy_run(tmp_path, folder, open_engine, replicas=2, count=5, publishes=False)


def views(*in_flight, first=0):
    return [
        ReplicaView(index=first + place, in_flight={f"{place}.{number}" for number in range(count)})
        for place, count in enumerate(in_flight)
    ]


def test_of_a_large_fleet_the_emptiest_and_the_fullest_are_asked_and_the_others_in_turn():
    by_version = {1: views(*range(1, 301)), 2: views(*range(600, 0, -1), first=1000), 3: views(7, first=5000)}
    asked = [choose(by_version, most=30, turn=turn) for turn in range(60)]
    for chosen in asked:
        assert len(chosen) == len(set(chosen)) == 30
        assert {0, 1, 298, 299, 1000, 1004, 1595, 1599} <= set(chosen)
    assert {*range(300), *range(1000, 1600)} == set().union(*asked)


def test_of_a_small_fleet_all_are_asked_but_those_that_are_alone_with_their_version():
    by_version = {1: views(3, 1, 2), 2: views(1, 9, first=10), 3: views(7, first=20)}
    assert sorted(choose(by_version, most=5, turn=3)) == [0, 1, 2, 10, 11]


@pytest.mark.parametrize("turn", range(12))
def test_none_is_asked_twice(turn):
    by_version = {1: views(*[4] * 9), 2: views(1, 2, first=20), 3: views(1, 1, 1, first=30)}
    chosen = choose(by_version, most=13, turn=turn)
    assert len(chosen) == len(set(chosen)) <= 14
