"""Our SGLang client beside a bare HTTP client: tokens a second, and CPU time for a token.

A real server runs on this machine's CPU, with a model made from a seed. Both clients take turns against it. The
bare client reads the bytes of its answers and drops them.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np
from transformers import Qwen3Config

from laminar_lab.bench.report import Ratio, Row, spread
from laminar_lab.bench.workplace import workplace, write_model
from laminar_py.config import ConfigError
from laminar_py.config.cluster import Device
from laminar_py.engines.sglang import Served, SGLangEngine, SGLangServer, replica_server
from laminar_py.records import GenerateRequest, SamplingParams

ROWS = ("client_over_bare_http", "client_cpu_us_per_token")
STREAMS, TOKENS, PROMPT = 32, 256, 16  # streams at a time, and tokens of each
VOCAB, MAX_LEN = 320, 2040
NO_IDS = np.empty(0, np.int32)
MODEL = Qwen3Config(  # 0.5 million parameters
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


def rows(*, repeats: int = 3) -> list[Row]:
    """Measure each figure, medians over `repeats` rounds. Raises `ConfigError` without an SGLang to run.

    The interpreter with SGLang is `LAMINAR_SGLANG_PYTHON`, or the environment of `make test-sglang`.
    """
    python = Path(os.environ.get("LAMINAR_SGLANG_PYTHON", ".venv-sglang/bin/python"))
    if not python.is_file():
        raise ConfigError(f"LAMINAR_SGLANG_PYTHON={python}: no such interpreter; `make test-sglang` makes it")
    with workplace() as folder:
        return asyncio.run(_rows(python, write_model(folder / "model", MODEL), repeats=repeats))


async def _rows(python: Path, model: Path, *, repeats: int) -> list[Row]:
    spec = replica_server(
        python,
        model,
        model / "sglang.log",
        max_batch=STREAMS,
        max_len=MAX_LEN,
        kv_capacity=STREAMS * MAX_LEN,
        device=Device.CPU,
        dtype="float32",
    )
    async with SGLangServer(spec) as server:
        served = Served(vocab=VOCAB, max_len=MAX_LEN)
        engine = SGLangEngine(server.url, api_key=server.api_key, served=served, stall_timeout_s=120)
        await engine.start()
        await engine.load_weights(model, 1)
        try:
            return await _compare(engine, server, repeats)
        finally:
            await engine.close()


async def _compare(engine: SGLangEngine, server: SGLangServer, rounds: int) -> list[Row]:
    """Measure our client's speed over a bare one, and the CPU time of both for a token."""
    headers = {"Authorization": f"Bearer {server.api_key}"}
    # the bare client has a connection for each request and a large buffer, as ours has
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    watch = asyncio.create_task(engine.watch())  # as a replica does
    async with aiohttp.ClientSession(headers=headers, connector=connector, read_bufsize=2**20) as session:
        clients = {"ours": partial(_ours, engine), "bare": partial(_bare, session, server.url)}
        speeds: dict[str, list[float]] = {"ours": [], "bare": []}
        costs: dict[str, list[float]] = {"ours": [], "bare": []}
        for turn in range(rounds + 1):  # the first warms both up
            for side in sorted(clients, reverse=turn % 2 == 0):
                speed, cost = await client_round(clients[side], f"{side}{turn}")
                if turn:
                    speeds[side].append(speed)
                    costs[side].append(cost)
    watch.cancel()
    ratio = Ratio.between(speeds["ours"], speeds["bare"])
    conditions = (
        f"{STREAMS} streams of {TOKENS} tokens, one token per event, model of 0.5 M parameters, {ratio}; the bare"
        f" client {median(speeds['bare']):,.0f} tokens/s"
    )
    spent = (
        f"CPU of the client's process in {rounds} rounds of the same streams, {spread(costs['ours'], '.1f')};"
        f" of the bare client's, {spread(costs['bare'], '.1f')}"
    )
    return [
        Row("client_over_bare_http", ratio.median, "x", conditions),
        Row("client_cpu_us_per_token", median(costs["ours"]), "us", spent),
    ]


async def client_round(stream: Callable[[str], Awaitable[None]], turn: str) -> tuple[float, float]:
    """Run all streams at once, each by a call with its name; return tokens/s and CPU microseconds a token."""
    began, cpu_began_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(stream(f"{turn}.{i}") for i in range(STREAMS)))
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began_s
    tokens = STREAMS * TOKENS
    return tokens / elapsed_s, 1e6 * cpu_s / tokens


def _request(name: str) -> GenerateRequest:
    seed = int.from_bytes(name.encode()[-6:], "little")
    prompt = np.random.default_rng(seed).integers(0, VOCAB, PROMPT, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=TOKENS)
    return GenerateRequest(rid=name, group_id=name, prompt_ids=prompt, prefix_ids=NO_IDS, sampling=sampling)


async def _ours(engine: SGLangEngine, name: str) -> None:
    count = 0
    async for delta in engine.generate(_request(name)):
        count += len(delta.ids)
    assert count == TOKENS, f"{name} has {count} tokens"


async def _bare(session: aiohttp.ClientSession, url: str, name: str) -> None:
    body = {
        "rid": name,
        "input_ids": _request(name).prompt_ids.tolist(),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
    }
    async with session.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        async for _ in response.content.iter_any():
            pass
