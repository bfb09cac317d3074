"""What makes a running server unusable for a run: each case is one line, before any prompt is sent."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from msgspec import structs

from laminar_py.config.rollout import OnNewWeights, RolloutConfig, SamplingConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.model_sizes import ModelSizes
from laminar_py.engines.sglang.attach import (
    Answers,
    ModelInfo,
    ServerInfo,
    check_server,
    find_fault,
    is_loopback,
)
from laminar_py.records.pieces import Recording

SIZES = ModelSizes(
    vocab_size=320, model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=64, num_hidden_layers=2
)
ROLLOUT = RolloutConfig(max_len=256)
SERVER = {"version": "0.5.23", "max_req_input_len": 258, "incremental_streaming_output": True, "tp_size": 1}
MODEL = {"model_path": "/elsewhere", "is_generation": True, "architectures": ["Qwen3ForCausalLM"]}


def answers(*, sizes=None, model=None, **server) -> Answers:
    told = ServerInfo(version="0.5.23", max_req_input_len=258, incremental_streaming_output=True)
    fields = {name: server.get(name, getattr(told, name)) for name in ServerInfo.__struct_fields__}
    return Answers(
        ServerInfo(**fields), model or ModelInfo("/elsewhere", True, "qwen3", ["Qwen3ForCausalLM"]), sizes
    )


def fault(said: Answers, *, rollout=ROLLOUT, api_key="ours", sizes=SIZES) -> str | None:
    return find_fault(said, sizes=sizes, rollout=rollout, api_key=api_key)


def test_a_server_as_we_launch_it_has_no_fault():
    assert fault(answers()) is None
    assert fault(answers(version="0.6.0rc1", admin_api_key="ours", sizes=SIZES)) is None


@pytest.mark.parametrize("version", ["0.5.22", "0.5.9.post1", "0.4.30", "nightly"])
def test_an_old_version_is_refused_before_anything_else(version):
    said = answers(version=version, max_req_input_len=0)
    assert fault(said) == f"runs SGLang {version}; install 0.5.23 or newer"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ModelInfo("m", True, "llama", ["LlamaForCausalLM"]), "(LlamaForCausalLM, but model.path has Qwen3ForCau"),
        (ModelInfo("m", True, "llama"), "(llama, but model.path has qwen3)"),
        (ModelInfo("m", True), "(nothing, but model.path has qwen3)"),
        (ModelInfo("m", False, "qwen3", ["Qwen3ForCausalLM"]), "serves another model"),
    ],
)
def test_another_architecture_is_another_model(model, words):
    assert words in fault(answers(model=model))


def test_other_sizes_are_another_model_where_its_folder_is_visible():
    deeper = structs.replace(SIZES, num_hidden_layers=3)
    longer = structs.replace(SIZES, max_position_embeddings=4096)
    assert fault(answers(sizes=longer)) is None
    assert "(num_hidden_layers=3, but model.path has 2)" in fault(answers(sizes=deeper))
    wider = structs.replace(deeper, hidden_size=96)
    assert "(hidden_size=96, but model.path has 64)" in fault(answers(sizes=wider)), "the first difference"


def test_a_server_must_hold_the_longest_trajectory():
    assert fault(answers(max_req_input_len=256)) is None
    words = fault(answers(max_req_input_len=255))
    assert "255 tokens, below rollout.max_len=256" in words
    assert "--context-length and --max-total-tokens of at least 264" in words


def test_routed_experts_need_their_flag():
    rollout = RolloutConfig(max_len=256, record=(Recording.ROUTED_EXPERTS,))
    assert "--enable-return-routed-experts" in fault(answers(), rollout=rollout)
    assert fault(answers(enable_return_routed_experts=True), rollout=rollout) is None


def test_sampling_masks_need_room_for_top_k():
    rollout = RolloutConfig(max_len=256, record=(Recording.SAMPLING_MASK,), sampling=SamplingConfig(top_k=50))
    assert "rollout.sampling.top_k=50" in fault(answers(sampling_mask_max_tokens=50), rollout=rollout)
    assert fault(answers(sampling_mask_max_tokens=51), rollout=rollout) is None


def test_new_weights_in_place_need_steps_that_do_not_overlap():
    rollout = RolloutConfig(max_len=256, on_new_weights=OnNewWeights.IN_PLACE)
    assert "--disable-overlap-schedule" in fault(answers(), rollout=rollout)
    assert fault(answers(disable_overlap_schedule=True), rollout=rollout) is None


@pytest.mark.parametrize(
    ("algorithm", "device", "words"),
    [
        (None, "cpu", None),
        ("NGRAM", "cuda", None),
        ("NGRAM", "cpu", "runs --speculative-algorithm NGRAM: off CUDA"),
        ("EAGLE", "cuda", "runs --speculative-algorithm EAGLE: drafts with weights"),
    ],
)
def test_a_server_may_speculate_only_where_tokens_come_from_the_runs_weights(algorithm, device, words):
    found = fault(answers(speculative_algorithm=algorithm, device=device))
    assert found is None if words is None else words in found


@pytest.mark.parametrize("kind", ["single", "acc"])
def test_a_server_that_accepts_drafts_by_a_threshold_is_refused(kind):
    assert "--speculative-accept-threshold" in fault(answers(**{f"speculative_accept_threshold_{kind}": 0.9}))


def test_a_key_that_only_admins_have_is_refused():
    assert "--admin-api-key" in fault(answers(admin_api_key="theirs"))


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:30000", True),
        ("http://127.8.0.1:1", True),
        ("https://localhost:30000/", True),
        ("http://[::1]:30000", True),
        ("http://10.0.0.5:30000", False),
        ("http://0.0.0.0:30000", False),
        ("http://localhost.example:30000", False),
        ("http://127.0.0.1.example:30000", False),
    ],
)
def test_loopback_is_known_by_address(url, loopback):
    assert is_loopback(url) is loopback


class Server:
    """Answers as SGLang does, to those who have its key."""

    def __init__(self, *, key=None, server=SERVER, paused=False):
        self.key, self.server = key, server
        self.goes_on = asyncio.Event()
        if not paused:
            self.goes_on.set()

    async def answer(self, request):
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/continue_generation":
            self.goes_on.set()
            return web.json_response({"status": "ok"})
        if request.path not in ("/server_info", "/model_info") or self.server is None:
            return web.Response(status=404)
        return web.json_response(self.server if request.path == "/server_info" else MODEL)

    @asynccontextmanager
    async def url(self):
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
        finally:
            await runner.cleanup()


@pytest.fixture
def model_dir(tmp_path):
    sizes = {"model_type": "qwen3", "vocab_size": 320, "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return tmp_path


async def check(server: Server, model_dir, *, key=None, rollout=ROLLOUT):
    async with server.url() as url:
        return await check_server(url, key, model_dir=model_dir, rollout=rollout)


async def refusal(server: Server, model_dir, *, key=None) -> str:
    with pytest.raises(ConfigError) as caught:
        await check(server, model_dir, key=key)
    line = str(caught.value)
    assert line.startswith("rollout.engine.urls=http://127.0.0.1:")
    assert "\n" not in line
    return line


async def test_a_good_server_is_attached(model_dir, caplog):
    await check(Server(key="secret"), model_dir, key="secret")
    assert not caplog.records


async def test_a_paused_server_is_attached_and_goes_on(model_dir):
    server = Server(paused=True)
    await check(server, model_dir)
    assert server.goes_on.is_set()


async def test_a_server_that_repeats_itself_is_attached_with_a_warning(model_dir, caplog):
    await check(Server(server={**SERVER, "incremental_streaming_output": False}), model_dir)
    assert "--incremental-streaming-output" in caplog.text


async def test_a_key_must_be_right(model_dir):
    for key in ("wrong", None):
        words = await refusal(Server(key="secret"), model_dir, key=key)
        assert "server_info was refused with 401" in words
        assert "set SGLANG_API_KEY to the server's --api-key" in words


async def test_a_fault_of_the_server_is_one_line(model_dir):
    old = {**SERVER, "version": "0.4.30"}
    assert "runs SGLang 0.4.30; install" in await refusal(Server(server=old), model_dir)


async def test_what_is_no_sglang_server_is_refused(model_dir):
    assert "server_info was refused with 404" in await refusal(Server(server=None), model_dir)
    assert "sent an invalid answer to server_info" in await refusal(Server(server={"version": 5}), model_dir)


@pytest.mark.parametrize("config", ['{"text_config": {"vocab_size": 320}}', "{", None])
async def test_a_model_without_sizes_is_refused_by_its_folder(config, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(
        ConfigError, match=rf"^model\.path={tmp_path}: config\.json .*; name the Hugging Face folder"
    ):
        await check(Server(), tmp_path)


async def test_silence_is_refused(model_dir):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"server_info failed: .*; start an SGLang server there, correct"):
            await check_server(url, None, model_dir=model_dir, rollout=ROLLOUT)


async def test_beyond_loopback_a_key_is_needed(model_dir):
    with pytest.raises(ConfigError, match="is beyond loopback and SGLANG_API_KEY has no key"):
        await check_server("http://10.0.0.5:30000", None, model_dir=model_dir, rollout=ROLLOUT)
