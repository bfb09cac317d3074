"""Adapters on a real SGLang server: the laws of every engine, and which adapters the server holds."""

import asyncio
import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from laminar_py.config.learner import LoraConfig
from laminar_py.engines.sglang.http import headers
from laminar_py.engines.sglang.server import SGLangServer
from laminar_py.records.engine import PauseMode
from laminar_py.rollout.verifying import TensorWatch
from tests.engines import engine_conformance as laws
from tests.engines.engine_conformance import LAWS, Caught, Rig, collect, make_request
from tests.engines.local.test_adapter import changed, save_adapter
from tests.engines.sglang.rig import make_model, make_spec
from tests.engines.sglang.test_engine import LAW_S, MAX_BATCH, MAX_LEN, VOCAB, client

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]

# those in which weights change under requests, which adapters do not
CHANGING = (
    laws.a_retracted_response_goes_on_under_the_new_weights,
    laws.a_response_paused_in_place_goes_on_under_the_new_weights,
    laws.a_retracted_token_is_of_the_version_that_it_names,
    laws.a_released_token_is_of_the_version_that_it_names,
    laws.a_token_on_an_old_kv_cache_says_so,
    laws.an_update_under_many_streams_loses_no_token,
    laws.twenty_updates_under_load_leave_the_same_weights,
)


@dataclass(frozen=True)
class Served:
    """Started once for all tests; each test has a client, and versions, of its own."""

    base: Path
    adapters: tuple[Path, Path]
    server: SGLangServer


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("sglang-lora")
    base = make_model(root / "base", seed=0, vocab=VOCAB)
    adapters = save_adapter(root / "a", base), save_adapter(root / "b", base, seed=1)
    spec = make_spec(base, root, max_batch=MAX_BATCH, lora=LoraConfig(rank=4))
    async with SGLangServer(spec) as server:
        yield Served(base, adapters, server)


@pytest.mark.parametrize("law", [law for law in LAWS if law not in CHANGING], ids=lambda law: law.__name__)
async def test_law(law, served):
    @asynccontextmanager
    async def make():
        async with client(served.server, base=served.base) as engine:
            await engine.load_weights(served.adapters[0], 1)
            yield Rig(engine, served.adapters, VOCAB, MAX_BATCH, MAX_LEN)

    async with asyncio.timeout(LAW_S):
        await law(make)


async def held(server: SGLangServer) -> set[str]:
    """Names of the adapters that a server has, as it says."""
    async with (
        aiohttp.ClientSession(headers=headers(server.api_key)) as session,
        session.get(f"{server.url}/v1/models") as answer,
    ):
        return {model["id"] for model in (await answer.json())["data"] if model["parent"] is not None}


async def test_of_many_versions_the_last_alone_stays_on_the_server(served):
    before = await held(served.server)
    async with client(served.server, base=served.base) as engine:
        for version in range(1, 31):
            await engine.load_weights(served.adapters[version % 2], version)
        (name,) = await held(served.server) - before
        response = await collect(engine, make_request(length=20))
    assert "-30-" in name
    assert response.versions == [30] * 20
    exact = laws.full_forward(served.adapters[0], [3, 4, 5, *response.ids], prompt=3)
    assert response.logprobs == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("held", [PauseMode.RETRACT, PauseMode.RELEASE])
async def test_requests_that_run_keep_their_adapter_and_a_partial_goes_on_under_the_next(served, held):
    async with asyncio.timeout(LAW_S), client(served.server, base=served.base) as engine:
        await engine.load_weights(served.adapters[0], 1)
        streams = [Caught(engine, make_request(f"r{i}", prompt=(3, 4, i), length=1900)) for i in range(8)]
        await streams[0].running()
        await engine.pause(held)
        with pytest.raises(RuntimeError, match="would keep their old adapter"):
            await engine.load_weights(served.adapters[1], 2)
        await engine.pause(PauseMode.ABORT)
        await engine.load_weights(served.adapters[1], 2)
        await engine.resume()
        partials = [await stream.response() for stream in streams]
        assert {version for partial in partials for version in partial.versions} == {1}
        prefix = partials[0].ids
        rest = await collect(engine, make_request(prompt=(3, 4, 0), prefix=prefix, length=len(prefix) + 20))
    assert rest.versions == [2] * 20
    exact = laws.full_forward(served.adapters[1], [3, 4, 0, *prefix, *rest.ids], prompt=3 + len(prefix))
    assert rest.logprobs == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize(
    ("rank", "fields", "fault"),
    [
        (8, {}, "has other tensors than the version before"),
        (4, {"revision": "0" * 64}, "the weights here differ from the learner's"),
    ],
    ids=["rank", "base"],
)
async def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays(
    served, tmp_path, rank, fields, fault
):
    folder = save_adapter(tmp_path / "adapter", served.base, rank=rank)
    changed(**fields)(folder)
    async with client(served.server, base=served.base) as engine:
        await engine.load_weights(served.adapters[0], 1)
        before = await held(served.server)
        with pytest.raises(ValueError, match=fault):
            await engine.load_weights(folder, 2)
        assert await held(served.server) == before
        assert (await collect(engine, make_request())).versions == [1] * 20


async def test_an_adapter_that_never_landed_is_named_by_its_hashes(served, tmp_path):
    folder, watch = tmp_path / "adapter", TensorWatch()

    def hold(adapter):
        shutil.rmtree(folder, ignore_errors=True)  # a new file, since the server maps the old one
        shutil.copytree(adapter, folder)

    async with client(served.server, base=served.base) as engine:
        hold(served.adapters[0])
        await engine.load_weights(folder, 1)
        first = await engine.checksum()
        assert len(first.tensors) == 2 * 4, "of two layers: qkv, out, up with gate, down"
        assert await watch.stale(folder, first) == ()
        hold(served.adapters[1])
        await engine.load_weights(folder, 2)
        second = await engine.checksum()
        assert await watch.stale(folder, second) == ()
        await engine.load_weights(folder, 3)  # the server reads the old bytes
        hold(served.adapters[0])  # and these were published
        third = await engine.checksum()
        assert third == second != first
        assert set(await watch.stale(folder, third)) == set(second.tensors)
