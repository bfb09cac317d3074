"""Launching and ending servers, with a program in the server's place that is quick to start and hard to end."""

import asyncio
import json
import os
import signal
import stat
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from laminar_py.children import hosted
from laminar_py.config.cluster import Device
from laminar_py.config.engine import Quantization
from laminar_py.config.loading import load_config, to_overrides
from laminar_py.config.section import ConfigError
from laminar_py.engines.sglang import server as server_module
from laminar_py.engines.sglang.backend import SGLANG
from laminar_py.engines.sglang.launch import ServerSpec, replica_server
from laminar_py.engines.sglang.server import EPHEMERAL_PORTS, SGLangServer, _free_port, last_words
from laminar_py.records.engine import EngineLostError
from laminar_py.records.host import MAX_FOLDER
from laminar_py.records.pieces import Recording
from tests.engines.sglang.owner import owned_server, wait_until_gone
from tests.runs.runs import REPO

PATIENCE_S = 20
STUBBORN = """
import http.server, mmap, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
loads = os.open(f"/dev/shm/sglang_loads_{os.getpid()}_guard.shm", os.O_CREAT | os.O_RDWR)
os.ftruncate(loads, 4096)
mapped = mmap.mmap(loads, 4096)
if os.fork() == 0:
    time.sleep(600)
subprocess.Popen(["sleep", "600"], start_new_session=True)
subprocess.Popen(["sh", "-c", "sleep 600 &"]).wait()  # an orphan

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """The folder for temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def program(folder: Path, code: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(0o700)
    return path


def spec(folder: Path, code: str = STUBBORN, **changes) -> ServerSpec:
    fields = {"python": program(folder, code), "model_dir": folder, "log": folder / "logs/0.log", "max_batch": 4}
    fields |= {"max_len": 64, "kv_capacity": 256, "device": Device.CPU}
    return replica_server(**(fields | changes))


@asynccontextmanager
async def running(spec: ServerSpec):
    async with asyncio.timeout(PATIENCE_S), SGLangServer(spec) as server:
        yield server
    assert "_guard.shm" not in " ".join(os.listdir("/dev/shm"))


def family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


async def test_stop_ends_everything_that_the_server_started(tmp_path, scratch):
    async with running(spec(tmp_path)) as server:
        processes = family(server.pid)
        assert len(processes) == 6, "stand-in, guard, server, its child, one in another session, an orphan"
    assert not [process for process in processes if process.is_running()]
    assert not list(scratch.iterdir())


async def test_a_server_has_a_short_folder_for_its_sockets_though_tmpdir_is_long(tmp_path, scratch, monkeypatch):
    long = scratch / ("x" * (149 - len(str(scratch))))
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    bind = f"""
import pathlib, socket, tempfile
path = tempfile.mktemp()  # as SGLang names its ipc sockets
pathlib.Path({str(tmp_path / "bound")!r}).write_text(path)
socket.socket(socket.AF_UNIX).bind(path)
"""
    async with running(spec(tmp_path, bind + STUBBORN)):
        bound = Path((tmp_path / "bound").read_text())
        assert len(str(bound.parent)) <= MAX_FOLDER + len("/laminar-sglang-12345678")
    assert bound.parent.name not in os.listdir("/tmp")


@pytest.mark.parametrize("victim", ["owner", "stand-in"])
async def test_nothing_outlives_a_killed(victim, tmp_path, scratch):
    async with asyncio.timeout(PATIENCE_S), owned_server(program(tmp_path, STUBBORN), tmp_path) as (owner, server):
        os.kill(owner if victim == "owner" else server[0].pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until_gone, server)
    assert not list(scratch.iterdir())


async def test_a_server_ends_even_if_all_that_watch_it_are_killed(tmp_path):
    async with asyncio.timeout(PATIENCE_S), owned_server(program(tmp_path, STUBBORN), tmp_path) as (owner, server):
        stand_in, guard, launcher, *children = server
        for pid in (guard.pid, stand_in.pid, owner):
            os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until_gone, [launcher])
        for child in children:  # those of the real one end with it
            child.kill()
    os.unlink(f"/dev/shm/sglang_loads_{launcher.pid}_guard.shm")


async def test_a_killed_server_is_reported_and_leaves_nothing(tmp_path):
    async with running(spec(tmp_path)) as server:
        _, _, launcher, *_ = processes = family(server.pid)
        launcher.kill()
        with pytest.raises(EngineLostError, match="ended with code 137"):
            await server.watch()
    assert not [process for process in processes if process.is_running()]


async def test_a_server_that_dies_in_its_start_is_one_line_with_its_last_error(tmp_path):
    code = "import sys; sys.exit('ValueError: no such model\\nkilling the rest')"
    with pytest.raises(
        EngineLostError, match=r"code 1; it last said: ValueError: no such model \(log: .*0\.log\)"
    ) as caught:
        async with running(spec(tmp_path, code)):
            pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("python", "words"),
    [(Path(sys.executable), "No module named 'sglang'"), (Path("no/python"), "No such file or directory")],
)
async def test_an_interpreter_without_sglang_is_named(python, words, tmp_path):
    with pytest.raises(EngineLostError, match=words):
        async with running(spec(tmp_path, python=python)):
            pass


async def test_a_start_that_takes_too_long_leaves_nothing(tmp_path, scratch):
    server = SGLangServer(spec(tmp_path, "import time; time.sleep(600)", start_timeout_s=0.5))
    with pytest.raises(EngineLostError, match=r"no answer within .*start_timeout_s=0\.5"):
        await server.start()
    assert not psutil.pid_exists(server.pid)
    assert not list(scratch.iterdir())


async def test_no_other_user_can_read_the_key(tmp_path, scratch):
    async with running(spec(tmp_path)) as server:
        assert not [process for process in family(server.pid) if server.api_key in " ".join(process.cmdline())]
        assert not [process for process in family(server.pid) if server.api_key in process.environ().values()]
        assert server.api_key.isalnum(), "a dash in front would make it a flag"
        words = [word for process in family(server.pid) for word in process.cmdline()]
        config = Path(next(word for word in words if word.endswith("config.yaml")))
        assert json.loads(config.read_text()) == {"api-key": server.api_key}  # noqa: ASYNC240
        assert not stat.S_IMODE(config.parent.stat().st_mode) & 0o077
        assert not stat.S_IMODE(server.spec.log.stat().st_mode) & 0o077


def flags(spec: ServerSpec) -> str:
    return " ".join(spec.command(30000)[3:]) + " "


def test_the_users_flags_win(tmp_path):
    chosen = {"load_format": "auto", "--context-length": 32, "skip-tokenizer-init": False, "enable-metrics": True}
    line = flags(spec(tmp_path, flags=chosen))
    assert "--load-format auto " in line
    assert "dummy" not in line
    assert "--context-length 32 " in line
    assert "--skip-tokenizer-init" not in line
    assert "--enable-metrics " in line


def test_routed_experts_need_their_flag(tmp_path):
    assert "--enable-return-routed-experts" not in flags(spec(tmp_path))
    assert "--enable-return-routed-experts " in flags(spec(tmp_path, record=(Recording.ROUTED_EXPERTS,)))


def test_a_gpu_gets_no_limit_on_its_kv_cache_and_a_cpu_must(tmp_path):
    assert "--max-total-tokens" not in flags(spec(tmp_path, device=Device.CUDA, kv_capacity=None))
    with pytest.raises(ConfigError, match=r"rollout\.kv_capacity"):
        spec(tmp_path, kv_capacity=None)


def test_a_flag_may_have_many_values(tmp_path):
    assert "--lora-paths a b --max-loras 2 " in flags(
        spec(tmp_path, flags={"lora-paths": ["a", "b"], "max_loras": 2})
    )


@pytest.mark.parametrize(("top_k", "words"), [(2048, ""), (2049, "--sampling-mask-max-tokens 4098 ")])
def test_long_masks_get_room_for_top_k_and_its_ties(top_k, words, tmp_path):
    line = flags(spec(tmp_path, record=(Recording.SAMPLING_MASK,), mask_tokens=top_k))
    assert words in line
    assert ("--sampling-mask-max-tokens" in line) is bool(words)
    assert "--sampling-mask-max-tokens" not in flags(spec(tmp_path, mask_tokens=top_k))


def test_a_server_that_rounds_weights_has_the_loader_that_can_load_them_again(tmp_path):
    def words(quantization):
        return flags(spec(tmp_path, device=Device.CUDA, quantization=quantization))

    assert "--load-format dummy" in words(Quantization.NONE)
    assert "--quantization" not in words(Quantization.NONE)
    for kind in (Quantization.FP8, Quantization.FP8_KV):
        assert "--load-format flash_rl" in words(kind)
        assert "--quantization fp8" in words(kind)
        assert ("--kv-cache-dtype fp8_e4m3" in words(kind)) is (kind is Quantization.FP8_KV)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "reloads rounded weights of Qwen2ForCausalLM, Qwen3ForCausalLM alone",
        ),
        ({"dtype": "float32"}, "config.json has another dtype than bfloat16"),
        ({}, "begins with the weights in this folder"),
    ],
)
def test_models_that_its_loader_cannot_round_are_refused_before_a_run(changes, line, tmp_path):
    config = {"vocab_size": 9, "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = {"kind": "sglang", "quantization": "fp8", "python": str(tmp_path / "python")}
    settings = {"model.path": str(tmp_path), "rollout.engine": engine}
    start = load_config(REPO / "configs/quickstart.yaml", ["warm_start=null", *to_overrides(settings)])
    with pytest.raises(ConfigError, match=f"with rollout.engine.quantization .*{line}"):
        SGLANG.check_start(start)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("port", "the run chooses it"),
        ("api_key", "the run chooses it"),
        ("--model-path", "set model.path"),
        ("model", "set model.path"),
        ("tp", "set rollout.engine.tensor_parallel"),
        ("tensor-parallel-size", "set rollout.engine.tensor_parallel"),
        ("dp_size", "a server is one replica"),
        ("pipeline", "a server is one replica"),
        ("nnodes", "a server is one replica"),
        ("base-gpu-id", "the cluster chooses the GPUs"),
        ("device", "set rollout.engine.device"),
        ("dtype", "set dtype in the config.json of model.path"),
        ("quantization", "set rollout.engine.quantization"),
        ("kv_cache_dtype", "set rollout.engine.quantization"),
    ],
)
def test_what_the_run_chooses_is_no_flag_in_any_spelling(name, remedy, tmp_path):
    with pytest.raises(ConfigError, match=f"rollout.engine.flags.{name}=1: {remedy}"):
        spec(tmp_path, flags={name: 1})


def test_ports_are_below_those_of_outgoing_connections():
    lowest = int(EPHEMERAL_PORTS.read_text().split()[0])
    ports = {_free_port() for _ in range(20)}
    assert len(ports) > 1
    assert 1024 <= min(ports) <= max(ports) < lowest


async def test_a_stranger_on_the_port_never_gets_the_key(tmp_path, monkeypatch):
    heard = asyncio.Event()
    stranger = await asyncio.start_server(lambda *_: heard.set(), "127.0.0.1", 0)
    port = stranger.sockets[0].getsockname()[1]
    monkeypatch.setattr("laminar_py.engines.sglang.server._free_port", lambda host: port)
    with pytest.raises(EngineLostError, match="no answer"):
        await SGLangServer(spec(tmp_path, "import time; time.sleep(600)", start_timeout_s=1.5)).start()
    stranger.close()
    assert not heard.is_set()


def test_last_words_are_the_last_error():
    crash = "[2026-01-01 00:00:00] Load weight begin.\nTraceback:\n  File\nRuntimeError: boom\n[now] Killed\n\n"
    assert last_words(crash) == "RuntimeError: boom"
    assert last_words("[2026-01-01 00:00:00 TP0] torch.cuda.OutOfMemoryError: full\n") == (
        "torch.cuda.OutOfMemoryError: full"
    )
    assert last_words("sglang serve: error: unrecognized arguments: --x\nbye") == (
        "sglang serve: error: unrecognized arguments: --x"
    )
    assert last_words("one\ntwo\n") == "two"
    assert last_words("") == "nothing"


async def test_the_log_of_a_server_is_bounded_and_still_explains_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(hosted, "LOG_BYTES", 100_000)
    monkeypatch.setattr(server_module, "TRIM_EVERY_S", 0.05)
    async with running(spec(tmp_path, "print('x' * 299_999, flush=True)\n" + STUBBORN)) as server:
        watching, log = asyncio.create_task(server.watch()), tmp_path / "logs/0.log"
        for _ in range(100):
            if log.stat().st_size < 100_000:
                break
            await asyncio.sleep(0.05)
        assert log.stat().st_size < 100_000
        with log.open("a") as file:
            file.write("ValueError: the last word\n")
        assert "it last said: ValueError: the last word" in server._explain("it ended")
        watching.cancel()
