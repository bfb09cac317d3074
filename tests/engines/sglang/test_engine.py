"""SGLang through the client, with real servers: the laws of every engine, and what only SGLang records."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from laminar_py.engines.sglang.engine import SGLangEngine
from laminar_py.engines.sglang.server import SGLangServer
from laminar_py.engines.sglang.stream import Served
from laminar_py.records.engine import EngineLostError, PauseMode
from laminar_py.records.pieces import Recording
from tests.engines import engine_conformance as laws
from tests.engines.engine_conformance import LAWS, Rig, caught, collect, make_request
from tests.engines.recording_conformance import RECORDING_LAWS
from tests.engines.sglang.rig import make_model, make_spec

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]

VOCAB, MAX_LEN, MAX_BATCH = 320, 2040, 32
EXPERTS = 8
LAW_S = 60


@dataclass(frozen=True)
class Servers:
    """Started once for all tests; each test has a client, and versions, of its own."""

    weights: tuple[Path, Path]
    plain: SGLangServer  # as a run launches it
    exact: SGLangServer  # without overlapped steps, as `in_place` needs it; began with weights[0] from disk
    began: str  # its checksum before anything was loaded
    mixture_model: Path
    mixture: SGLangServer  # records routed experts


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers(tmp_path_factory):
    root = tmp_path_factory.mktemp("sglang")
    weights = tuple(make_model(root / f"v{seed}", seed=seed, vocab=VOCAB) for seed in range(2))
    mixture_model = make_model(root / "mixture", seed=2, vocab=VOCAB, experts=EXPERTS)
    flags = {"disable-overlap-schedule": True, "load-format": "auto"}
    made = [
        SGLangServer(make_spec(weights[0], root / "plain", max_batch=MAX_BATCH)),
        SGLangServer(make_spec(weights[0], root / "exact", max_batch=MAX_BATCH, flags=flags)),
        SGLangServer(make_spec(mixture_model, root / "mixture", record=tuple(Recording))),
    ]
    try:
        for server in made:  # one after the other: there are two cores
            await server.start()
        async with client(made[1]) as engine:
            began = (await engine.checksum()).total
        yield Servers(weights, made[0], made[1], began, mixture_model, made[2])
    finally:
        for server in made:
            await server.stop()


@asynccontextmanager
async def client(server, **served):
    engine = SGLangEngine(
        server.url,
        api_key=server.api_key,
        served=Served(vocab=VOCAB, max_len=MAX_LEN, **served),
        stall_timeout_s=30,
        watch_server=server.watch,
    )
    await engine.start()
    watching = asyncio.create_task(engine.watch())
    try:
        yield engine
    finally:
        watching.cancel()
        await engine.close()


def factory(server, weights, **served):
    @asynccontextmanager
    async def make():
        async with client(server, **served) as engine:
            await engine.load_weights(weights[0], 1)
            yield Rig(engine, weights, VOCAB, MAX_BATCH, MAX_LEN)

    return make


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_law(law, servers):
    exact = law is laws.a_token_on_an_old_kv_cache_says_so
    async with asyncio.timeout(LAW_S):
        await law(factory(servers.exact if exact else servers.plain, servers.weights))


async def test_changes_reach_the_stacked_experts_of_a_mixture(servers):
    weights = (servers.mixture_model, servers.mixture_model)
    settings = {"record": (Recording.ROUTED_EXPERTS,), "experts_top_k": 2}
    async with asyncio.timeout(LAW_S):
        await laws.changes_of_twenty_versions_leave_the_weights_of_a_whole_load(
            factory(servers.mixture, weights, **settings)
        )


async def test_loaded_weights_are_those_of_a_server_that_began_with_them(servers):
    async with client(servers.plain) as engine:
        await engine.load_weights(servers.weights[1], 1)
        assert (await engine.checksum()).total != servers.began
        await engine.load_weights(servers.weights[0], 2)
        assert (await engine.checksum()).total == servers.began


async def test_a_server_that_another_client_left_paused_serves_the_next_one(servers):
    async with client(servers.plain) as engine:
        await engine.load_weights(servers.weights[0], 1)
        left = await caught(engine, make_request(length=1900))
        await engine.pause(PauseMode.RETRACT)
    with pytest.raises(EngineLostError):
        await left.response()
    async with asyncio.timeout(LAW_S), client(servers.plain) as engine:
        await engine.load_weights(servers.weights[1], 1)
        assert len((await collect(engine, make_request())).ids) == 20


async def test_a_folder_that_does_not_fit_is_refused_and_the_old_weights_stay(servers, tmp_path):
    other = make_model(tmp_path / "other", seed=0, vocab=VOCAB, hidden=96)
    async with client(servers.plain) as engine:
        await engine.load_weights(servers.weights[0], 1)
        before = (await engine.checksum()).total
        with pytest.raises(ValueError, match="other tensors"):
            await engine.load_weights(other, 2)
        assert (await engine.checksum()).total == before
        assert (await collect(engine, make_request())).versions == [1] * 20


async def test_load_is_told_while_requests_run(servers):
    async with client(servers.plain) as engine:
        await engine.load_weights(servers.weights[0], 1)
        stream = await caught(engine, make_request(length=1900))
        async with asyncio.timeout(20):
            while not engine.status().kv_used:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert engine.status().running == 1
        assert engine.status().kv_capacity >= 32768
        await engine.abort("r")
        await stream.response()


# ---- what is recorded


@pytest.mark.parametrize("law", RECORDING_LAWS, ids=lambda law: law.__name__)
async def test_law_of_recording(law, servers):
    weights = (servers.mixture_model, servers.mixture_model)
    settings = {"record": (Recording.ROUTED_EXPERTS,), "experts_top_k": 2}
    async with asyncio.timeout(LAW_S):
        await law(factory(servers.mixture, weights, **settings))


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_k": 20, "top_p": 0.7}, {"top_k": 50, "min_p": 0.3}], ids=str)
async def test_a_cut_vocabulary_comes_with_its_mask_and_renormalised_log_probabilities(servers, cut):
    async with client(servers.plain, record=(Recording.SAMPLING_MASK,)) as engine:
        await engine.load_weights(servers.weights[0], 1)
        response = await collect(engine, make_request(length=40, temperature=1.0, **cut))
    masks = [delta.sampling_mask for delta in response.deltas]
    ids = np.concatenate([mask.ids for mask in masks])
    rows = np.split(ids, np.cumsum(np.concatenate([mask.counts for mask in masks]))[:-1])
    assert len(rows) == 40
    assert max(len(row) for row in rows) <= cut["top_k"]
    model = AutoModelForCausalLM.from_pretrained(servers.weights[0], dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[3, 4, 5, *response.ids]])).logits[0, 2:-1]
    for row, token, logprob, line in zip(rows, response.ids, response.logprobs, logits, strict=True):
        kept = torch.log_softmax(line[torch.from_numpy(row).long()], -1)
        assert kept[list(row).index(token)].item() == pytest.approx(logprob, abs=1e-4)


# ---- loss; last, because it ends a server


async def test_a_server_that_is_killed_is_lost_to_every_call_and_stream(servers):
    async with asyncio.timeout(LAW_S):
        await laws.a_lost_engine_says_so_in_every_method(
            factory(servers.exact, servers.weights), lambda _: kill_server(servers.exact)
        )


def kill_server(server):
    import psutil

    for process in psutil.Process(server.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
