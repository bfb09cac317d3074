"""The real server as we launch it. Each start takes about 20 s, so most tests share one."""

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack

import aiohttp
import psutil
import pytest
import pytest_asyncio

from laminar_py.config.rollout import OnNewWeights, RolloutConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.sglang.attach import check_server
from laminar_py.records.engine import EngineLostError
from tests.engines.sglang.owner import owned_server, wait_until_gone
from tests.engines.sglang.rig import make_model, running_server, sglang_python

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]
PATIENCE_S = 400
MAX_LEN = 256
EOS = 1  # of the models that the rig makes


class Client:
    """Bare calls to one server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def call(self, name: str, **body):
        async with (
            asyncio.timeout(PATIENCE_S),
            aiohttp.ClientSession(headers=self._headers) as session,
            session.post(f"{self._url}/{name}", json=body) as response,
        ):
            return response.status, json.loads(await response.text() or "null")

    async def generate(self, ids, *, count, **sampling):
        params = {"temperature": 1.0, "max_new_tokens": count, **sampling}
        status, answer = await self.call("generate", input_ids=ids, sampling_params=params, return_logprob=True)
        assert status == 200, answer
        return answer

    async def checksums(self):
        _, answer = await self.call("weights_checker", action="checksum")
        return answer["ranks"][0]["checksums"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def weights(folder):
    return make_model(folder / "weights", seed=1, max_len=MAX_LEN)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder):
    model = make_model(folder / "model", seed=0, max_len=MAX_LEN)
    changes = {"max_len": MAX_LEN, "kv_capacity": MAX_LEN}
    async with running_server(model, folder / "logs", **changes) as server:
        yield server


@pytest.fixture
def client(server):
    return Client(server.url, server.api_key)


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_server_answers_only_to_its_key(key, server):
    for call in ("generate", "update_weights_from_disk", "pause_generation", "abort_request"):
        status, _ = await Client(server.url, key).call(call)
        assert status == 401, call


async def test_the_key_is_on_no_command_line(server):
    processes = psutil.Process(server.pid).children(recursive=True)
    assert len(processes) >= 3
    assert not [process for process in processes if server.api_key in " ".join(process.cmdline())]


@pytest.mark.parametrize(("prompt", "count"), [(10, MAX_LEN - 10), (MAX_LEN - 1, 1)])
async def test_a_trajectory_may_have_max_len_tokens(prompt, count, client):
    answer = await client.generate(list(range(2, 2 + prompt)), count=count, ignore_eos=True)
    assert len(answer["output_ids"]) == count


async def test_ignore_eos_ignores_stop_ids_too(client):
    """Stop ids need `ignore_eos` to be false, although the model's own end then ends a response too."""
    always_eos = {"logit_bias": {str(EOS): 100.0}, "stop_token_ids": [EOS]}
    ignored = await client.generate([5, 6], count=4, ignore_eos=True, **always_eos)
    stopped = await client.generate([5, 6], count=4, **always_eos)
    assert ignored["output_ids"] == [EOS] * 4
    assert stopped["output_ids"] == [EOS]
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"


async def test_a_server_of_ours_can_be_attached(server, caplog):
    rollout = RolloutConfig(max_len=MAX_LEN)
    await check_server(server.url, server.api_key, model_dir=server.spec.model_dir, rollout=rollout)
    assert not caplog.records


async def test_a_server_that_was_left_paused_can_be_attached(server, client):
    await client.call("pause_generation", mode="retract")
    rollout = RolloutConfig(max_len=MAX_LEN)
    await check_server(server.url, server.api_key, model_dir=server.spec.model_dir, rollout=rollout)
    assert len((await client.generate([5, 6], count=4, ignore_eos=True))["output_ids"]) == 4


async def test_overlapped_steps_are_no_place_for_new_weights(server):
    rollout = RolloutConfig(max_len=MAX_LEN, on_new_weights=OnNewWeights.IN_PLACE)
    with pytest.raises(ConfigError, match="--disable-overlap-schedule"):
        await check_server(server.url, server.api_key, model_dir=server.spec.model_dir, rollout=rollout)


@pytest.mark.parametrize(
    ("model", "words"), [({"vocab": 352}, "vocab_size=320"), ({"hidden": 96}, "hidden_size=64")]
)
async def test_a_server_with_another_model_is_refused(model, words, server, tmp_path):
    other = make_model(tmp_path, seed=0, max_len=MAX_LEN, **model)
    with pytest.raises(ConfigError, match=words):
        await check_server(server.url, server.api_key, model_dir=other, rollout=RolloutConfig(max_len=MAX_LEN))


async def test_late_weights_are_those_of_a_server_that_started_with_them(client, weights, folder):
    random = await client.checksums()
    status, _ = await client.call("update_weights_from_disk", model_path=str(weights), load_format="auto")
    assert status == 200
    async with running_server(weights, folder, max_len=MAX_LEN, flags={"load-format": "auto"}) as fresh:
        expected = await Client(fresh.url, fresh.api_key).checksums()
        processes = [psutil.Process(fresh.pid), *psutil.Process(fresh.pid).children(recursive=True)]
    assert random.keys() == expected.keys()
    assert random != expected
    assert await client.checksums() == expected
    assert not [process for process in processes if process.is_running()], "stop leaves nothing"


async def test_no_process_outlives_a_killed_owner(weights):
    async with asyncio.timeout(PATIENCE_S), owned_server(sglang_python(), weights) as (owner, server):
        assert len(server) >= 5, "stand-in, guard, server, scheduler, detokenizer"
        os.kill(owner, signal.SIGKILL)
        await asyncio.to_thread(wait_until_gone, server)


async def test_a_model_that_cannot_be_served_is_named_in_one_line(folder, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of", "architectures": ["UnheardOf"]}')
    async with AsyncExitStack() as stack:
        with pytest.raises(EngineLostError, match=r"ended with code 1; .*unheard_of") as caught:
            await stack.enter_async_context(running_server(tmp_path, tmp_path))
    assert "\n" not in str(caught.value)


async def test_a_flag_that_sglang_does_not_know_is_named_in_one_line(weights, tmp_path):
    with pytest.raises(EngineLostError, match="unrecognized arguments: --no-such-flag 1"):
        async with running_server(weights, tmp_path, flags={"no-such-flag": 1}):
            pass
