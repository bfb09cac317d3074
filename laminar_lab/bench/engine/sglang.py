"""SGLang through our client.

Its overhead against a bare HTTP client, and the pause of running streams for new weights.

Real servers run on this machine's CPU, with models made from a seed. The sides of a comparison take turns against
one server.
"""

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median

import aiohttp
import numpy as np
from transformers import Qwen3Config

from laminar_lab.bench.report import Ratio, Row, log_line, spread
from laminar_lab.bench.workplace import write_model
from laminar_py.config import ConfigError
from laminar_py.config.cluster import Device
from laminar_py.engines.sglang import Flags, Served, SGLangEngine, SGLangServer, replica_server
from laminar_py.records import FinishReason, GenerateRequest, PauseMode, Recording, SamplingParams

ROWS = (
    "client_over_bare_http client_cpu_us_per_token refresh_in_place_over_bare refresh_drain_s refresh_resume_s "
    "refresh_retract_over_bare"
)
STREAMS = 32
TOKENS = 256  # of each stream, for the overhead
LONG_TOKENS = 512  # of each stream under which weights change; none comes to its end
PROMPT = 16
VOCAB = 320
MAX_LEN = 2040
WARM_TOKENS = 16  # of each stream before the first refresh
AFTER_TOKENS = 8  # of each stream after one
REFRESHES = 20
NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served model with its server, and our client of it."""

    engine: SGLangEngine
    server: SGLangServer
    weights: Path

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
    flags: Flags | None = None,
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
        flags=flags,
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
    small = write_model(folder / "small", _config(hidden=128, layers=2, intermediate=384))
    large = write_model(folder / "large", _config(hidden=512, layers=13, intermediate=1632))
    async with _serving(python, small) as rig:
        overhead = await overhead_rows(rig, repeats)
    async with _serving(python, large, flags={"disable-overlap-schedule": True}) as rig:
        in_place = await _in_place_row(rig, REFRESHES)  # as a run launches it for that policy
    async with _serving(python, large) as rig:
        return [*overhead, in_place, *await _refreshes(rig, REFRESHES)]


def _config(*, hidden: int, layers: int, intermediate: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )


@asynccontextmanager
async def _serving(python: Path, model: Path, *, flags: Flags | None = None) -> AsyncIterator[ServedModel]:
    async with (
        cpu_server(python, model, slots=STREAMS, max_len=MAX_LEN, flags=flags) as server,
        connected(server, Served(vocab=VOCAB, max_len=MAX_LEN)) as engine,
    ):
        yield ServedModel(engine, server, model)


def _request(name: str, *, length: int, prefix: list[int] | None = None) -> GenerateRequest:
    seed = int.from_bytes(name.encode()[-6:], "little")
    prompt = np.random.default_rng(seed).integers(0, VOCAB, PROMPT, dtype=np.int32)
    ids = NO_IDS if prefix is None else np.array(prefix, np.int32)
    return GenerateRequest(
        rid=name, group_id=name, prompt_ids=prompt, prefix_ids=ids, sampling=SamplingParams(max_new_tokens=length)
    )


# ---- overhead


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
    speeds, costs = ({side: [one[part] for one in taken[1:]] for side, taken in found.items()} for part in (0, 1))
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
    async for delta in rig.engine.generate(_request(name, length=TOKENS)):
        count += len(delta.ids)
    assert count == TOKENS, f"{name} has {count} tokens"


async def _bare(rig: ServedModel, session: aiohttp.ClientSession, name: str) -> None:
    request = _request(name, length=TOKENS)
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


# ---- refresh


@dataclass(slots=True, kw_only=True)
class Crowd:
    """Streams that keep running, and the moments of their tokens."""

    engine: SGLangEngine
    length: int
    ids: dict[str, list[int]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)  # arrivals of each stream's deltas with tokens
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, turn: str | None = None) -> None:
        """Start new streams, which a turn names, or start each stream again from its tokens so far."""
        if turn is not None:
            self.ids = {f"{turn}.{i}": [] for i in range(STREAMS)}
            self.times = {name: [] for name in self.ids}
        self.tasks = [asyncio.create_task(self._run(name)) for name in self.ids]

    async def _run(self, name: str) -> None:
        ids = self.ids[name]
        async for delta in self.engine.generate(_request(name, length=self.length, prefix=ids)):
            if len(delta.ids):
                self.times[name].append(time.perf_counter())
                ids.extend(delta.ids.tolist())
            if delta.finish_reason is FinishReason.ABORT:
                return

    async def wait_for_tokens(self, tokens: int) -> None:
        """Wait until every stream has so many tokens more, or has ended."""
        targets = {name: len(ids) + tokens for name, ids in self.ids.items()}
        while any(len(self.ids[name]) < targets[name] for name in targets) and not all(  # noqa: ASYNC110
            task.done() for task in self.tasks
        ):
            await asyncio.sleep(0.005)

    async def wait_for_end(self) -> None:
        """Wait until every stream has ended."""
        await asyncio.gather(*self.tasks)

    def pause_s(self, loaded: float, *, since: float = 0.0) -> float:
        """Return the time without a token around the load at `loaded`, less the usual gap.

        The mean of all streams.

        Streams that begin after the load have waited from `since` on.
        """
        return mean(_pause_s(times, loaded, since) for times in self.times.values())


def _pause_s(times: list[float], loaded: float, since: float) -> float:
    last = max((time_s for time_s in times if time_s <= loaded), default=since)
    first = min(time_s for time_s in times if time_s > loaded)
    return first - last - median(b - a for a, b in itertools.pairwise(times[-WARM_TOKENS:]))


async def _refreshes(rig: ServedModel, count: int) -> list[Row]:
    bare = await _bare_updates(rig, count)
    prefills: list[float] = []

    async def prefill(contexts: dict[str, list[int]]) -> None:
        await _load_next(rig)  # drops the prefix cache
        prefills.append(await _prefill_s(rig, contexts))

    retract = await _median_pause_s(rig, PauseMode.RETRACT, count, then=prefill)
    resume = await _median_pause_s(rig, PauseMode.ABORT, count)
    drain = await _drained(rig, count)
    alone, setting = median(prefills), _conditions(count, bare)
    log_line(f"retract {retract:.3f} s, prefill alone {alone:.3f} s, resume {resume:.3f} s, drain {drain:.3f} s")
    more = f"{setting}; retraction {retract:.2f} s, re-prefill of the contexts alone {alone * 1000:.0f} ms"
    return [
        Row("refresh_drain_s", drain, "s", f"{setting}; streams of {WARM_TOKENS} tokens that end together"),
        Row("refresh_resume_s", resume, "s", more),
        Row("refresh_retract_over_bare", retract / (bare + alone), "x", more),
    ]


async def _in_place_row(rig: ServedModel, count: int) -> Row:
    bare = await _bare_updates(rig, count)
    in_place = await _median_pause_s(rig, PauseMode.IN_PLACE, count)
    log_line(f"in_place {in_place:.3f} s, bare update {bare:.3f} s")
    conditions = f"{_conditions(count, bare)}; no overlapped steps; in place {in_place * 1000:.0f} ms"
    return Row("refresh_in_place_over_bare", in_place / bare, "x", conditions)


def _conditions(count: int, bare: float) -> str:
    return (
        f"{STREAMS} streams, model of 43 M parameters in fp32 (173 MB), median of {count}; bare"
        f" /update_weights_from_disk on the idle server {bare * 1000:.0f} ms"
    )


async def _bare_updates(rig: ServedModel, count: int) -> float:
    body = {"model_path": str(rig.weights), "load_format": "auto", "weight_version": "1", "flush_cache": False}
    elapsed = []
    async with aiohttp.ClientSession(headers=rig.headers) as session:
        for _ in range(count + 1):
            began = time.perf_counter()
            async with session.post(f"{rig.server.url}/update_weights_from_disk", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()
            elapsed.append(time.perf_counter() - began)
    return median(elapsed[1:])


async def _median_pause_s(
    rig: ServedModel,
    mode: PauseMode,
    count: int,
    *,
    then: Callable[[dict[str, list[int]]], Awaitable[None]] | None = None,
) -> float:
    """Load a version under running streams, so many times; return the median of their pauses.

    Streams that the mode aborts start again from their tokens. After each time `then` gets the idle server, with
    the tokens that each stream had when the pause began.
    """
    pauses = []
    for turn in range(count):
        crowd = Crowd(engine=rig.engine, length=LONG_TOKENS)
        crowd.start(f"{mode}{turn}")
        await crowd.wait_for_tokens(WARM_TOKENS)
        await rig.engine.pause(mode)
        if mode is PauseMode.ABORT:
            await crowd.wait_for_end()
        contexts = {name: list(ids) for name, ids in crowd.ids.items()}
        loaded = await _load_next(rig)
        await rig.engine.resume()
        if mode is PauseMode.ABORT:
            crowd.start()
        await crowd.wait_for_tokens(AFTER_TOKENS)
        pauses.append(crowd.pause_s(loaded))
        await rig.engine.pause(PauseMode.ABORT)
        await crowd.wait_for_end()
        await rig.engine.resume()
        if then is not None:
            await then(contexts)
    return median(pauses)


async def _load_next(rig: ServedModel) -> float:
    """Load the next version; returns the moment at which it was loaded."""
    await rig.engine.load_weights(rig.weights, rig.engine.status().version + 1)
    return time.perf_counter()


async def _prefill_s(rig: ServedModel, contexts: dict[str, list[int]]) -> float:
    async def first_token(name: str, ids: list[int]) -> None:
        async for _ in rig.engine.generate(_request(name, length=len(ids) + 1, prefix=ids)):
            pass

    began = time.perf_counter()
    await asyncio.gather(*(first_token(name, ids) for name, ids in contexts.items()))
    return time.perf_counter() - began


async def _drained(rig: ServedModel, count: int) -> float:
    pauses = []
    for turn in range(count):
        crowd = Crowd(engine=rig.engine, length=WARM_TOKENS)
        crowd.start(f"d{turn}")
        await crowd.wait_for_end()
        last = max(times[-1] for times in crowd.times.values())
        loaded = await _load_next(rig)
        crowd.start(f"e{turn}")
        await crowd.wait_for_end()
        pauses.append(crowd.pause_s(loaded, since=last))
    return median(pauses)
