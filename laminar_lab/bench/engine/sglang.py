"""Our SGLang client beside a bare HTTP client: tokens a second, and CPU time for a token.

A real server runs on this machine's CPU, with a model made from a seed. Both clients take turns against it.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np
from transformers import Qwen3Config

from laminar_lab.bench.report import Ratio, Row, log_line, spread
from laminar_lab.bench.workplace import write_model
from laminar_py.config import ConfigError
from laminar_py.config.cluster import Device
from laminar_py.engines.sglang import Served, SGLangEngine, SGLangServer, replica_server
from laminar_py.records import GenerateRequest, Recording, SamplingParams

ROWS = ("client_over_bare_http", "client_cpu_us_per_token")
STREAMS = 32
TOKENS = 256  # of each stream
PROMPT = 16
VOCAB = 320
MAX_LEN = 2040
NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served model with its server, and our client of it."""

    engine: SGLangEngine
    server: SGLangServer

    @property
    def headers(self) -> dict[str, str]:
        """Headers for a bare client."""
        return {"Authorization": f"Bearer {self.server.api_key}"}


def rows(*, repeats: int = 3) -> list[Row]:
    """Measure each figure. Raises `ConfigError` without an SGLang to run."""
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        return asyncio.run(_rows(find_python(), Path(folder), repeats=repeats))


def find_python() -> Path:
    """Return the interpreter with SGLang: `LAMINAR_SGLANG_PYTHON`, or the environment of `make test-sglang`."""
    python = Path(os.environ.get("LAMINAR_SGLANG_PYTHON", ".venv-sglang/bin/python"))
    if not python.is_file():
        raise ConfigError(f"LAMINAR_SGLANG_PYTHON={python}: no such interpreter; `make test-sglang` makes it")
    return python


def cpu_server(
    python: Path,
    model: Path,
    *,
    slots: int,
    max_len: int,
    record: tuple[Recording, ...] = (),
) -> SGLangServer:
    """Make a server of that model on this machine's CPU, not started; its log is beside the model."""
    spec = replica_server(
        python,
        model,
        model / "sglang.log",
        max_batch=slots,
        max_len=max_len,
        kv_capacity=slots * max_len,
        device=Device.CPU,
        dtype="float32",
        record=record,
    )
    return SGLangServer(spec)


@asynccontextmanager
async def connected(server: SGLangServer, served: Served) -> AsyncIterator[SGLangEngine]:
    """Yield our client of a running server, with the server's own weights as version 1."""
    engine = SGLangEngine(server.url, api_key=server.api_key, served=served, stall_timeout_s=120)
    await engine.start()
    await engine.load_weights(server.spec.model_dir, 1)
    yield engine
    await engine.close()


async def _rows(python: Path, folder: Path, *, repeats: int) -> list[Row]:
    """Start a server of a model of 0.5 M parameters, connect our client, and measure."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = write_model(folder / "model", config)
    async with (
        cpu_server(python, model, slots=STREAMS, max_len=MAX_LEN) as server,
        connected(server, Served(vocab=VOCAB, max_len=MAX_LEN)) as engine,
    ):
        return await overhead_rows(ServedModel(engine, server), repeats)


def _request(name: str) -> GenerateRequest:
    seed = int.from_bytes(name.encode()[-6:], "little")
    prompt = np.random.default_rng(seed).integers(0, VOCAB, PROMPT, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=TOKENS)
    return GenerateRequest(rid=name, group_id=name, prompt_ids=prompt, prefix_ids=NO_IDS, sampling=sampling)


async def overhead_rows(rig: ServedModel, rounds: int) -> list[Row]:
    """Measure our client's speed over a bare one, and its CPU time for a token, medians over `rounds`."""
    # the bare client has a connection for each request and a large buffer, as ours has
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    watch = asyncio.create_task(rig.engine.watch())  # as a replica does
    async with aiohttp.ClientSession(headers=rig.headers, connector=connector, read_bufsize=2**20) as session:
        streams = {"ours": partial(_ours, rig), "bare": partial(_bare, rig, session)}
        found: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
        for turn in range(rounds + 1):  # the first warms both up
            for side in sorted(streams, reverse=turn % 2 == 0):
                found[side].append(await client_round(streams[side], f"{side}{turn}"))
    watch.cancel()
    speeds, costs = (
        {side: [figures[part] for figures in taken[1:]] for side, taken in found.items()} for part in (0, 1)
    )
    ratio = Ratio.between(speeds["ours"], speeds["bare"])
    conditions = (
        f"{STREAMS} streams of {TOKENS} tokens, one token per event, model of 0.5 M parameters, {ratio}; bare:"
        f" reads the bytes and drops them, {median(speeds['bare']):,.0f} tokens/s"
    )
    spent = (
        f"CPU of the client's process in {rounds} rounds of the same streams, {spread(costs['ours'], '.1f')};"
        f" of the bare client's, {spread(costs['bare'], '.1f')}"
    )
    rows = [
        Row("client_over_bare_http", ratio.median, "x", conditions),
        Row("client_cpu_us_per_token", median(costs["ours"]), "us", spent),
    ]
    for row in rows:
        log_line(f"{row.name} {row.value:.3f}: {row.conditions}")
    return rows


async def client_round(stream: Callable[[str], Awaitable[None]], turn: str) -> tuple[float, float]:
    """Run all streams at once, each by a call with its name; return tokens/s and CPU microseconds a token."""
    began, cpu_began_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(stream(f"{turn}.{i}") for i in range(STREAMS)))
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began_s
    tokens = STREAMS * TOKENS
    return tokens / elapsed_s, 1e6 * cpu_s / tokens


async def _ours(rig: ServedModel, name: str) -> None:
    count = 0
    async for delta in rig.engine.generate(_request(name)):
        count += len(delta.ids)
    assert count == TOKENS, f"{name} has {count} tokens"


async def _bare(rig: ServedModel, session: aiohttp.ClientSession, name: str) -> None:
    """Send a request by plain HTTP, read the bytes of its answer and drop them."""
    request = _request(name)
    body = {
        "rid": name,
        "input_ids": request.prompt_ids.tolist(),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
    }
    async with session.post(f"{rig.server.url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        async for _ in response.content.iter_any():
            pass
