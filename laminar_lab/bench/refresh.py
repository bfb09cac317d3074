"""New weights in an engine that stands still: changed positions beside a whole version, and both beside the disk.

The versions are a real learner's: AdamW steps at 1e-6 on fp32 weights with random gradients, published in bf16.
A round steps once, then times each side on a drained engine. Changes are checked before, as a replica does while
its engine generates. Before the rounds, 20 versions come as changes alone, and the engine's hashes must equal the
hashes after a whole load. The sides of SGLang need `sglang=`, the folder of an environment with it; the third side
there is the server's own loader of safetensors.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import psutil
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from laminar_lab.bench.report import Ratio, Row, in_turn
from laminar_lab.bench.workplace import SHARED_MEMORY, workplace
from laminar_py.config.cluster import Device
from laminar_py.engines.local import LocalEngine
from laminar_py.engines.sglang import Served, SGLangEngine, SGLangServer, replica_server
from laminar_py.records.engine import InferenceEngine
from laminar_py.records.weights import AT, TO

ROWS = (
    "refresh_delta_over_full_local",
    "refresh_delta_over_full_sglang",
    "refresh_extra_over_bound_sglang",
    "refresh_full_over_disk_sglang",
    "refresh_delta_over_disk_sglang",
)
VERSIONS = 20  # by changes alone
LR = 1e-6
MAX_LEN = 256
NONE = Path("/dev/null")
MEDIUM = Qwen3Config(  # 43 million parameters
    vocab_size=16384,
    hidden_size=512,
    num_hidden_layers=11,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1536,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    dtype="bfloat16",
    eos_token_id=1,
    pad_token_id=0,
    architectures=["Qwen3ForCausalLM"],
)


class VersionWriter:
    """Steps a model and writes its newest version in `folder`: whole, and as changes since the version before."""

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        self.version, self.whole, self.changes = 0, folder / "whole", folder / "changes.safetensors"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).float()
        self._weights = dict(model.named_parameters())
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=LR)
        self._random = torch.Generator().manual_seed(0)
        config.save_pretrained(self.whole)
        self.published = self._write_whole()
        for _ in range(3):  # AdamW's first steps are larger
            self._learn()

    @property
    def parameters(self) -> int:
        """Values of a version."""
        return sum(tensor.numel() for tensor in self.published.values())

    @property
    def bound_bytes(self) -> int:
        """Bytes of the newest changes and of the largest tensor."""
        return self.changes.stat().st_size + max(tensor.nbytes for tensor in self.published.values())

    @property
    def share(self) -> float:
        """Share of the values that the newest changes name; each takes 10 bytes."""
        return self.changes.stat().st_size / 10 / self.parameters

    def step(self) -> None:
        """Take a step of the optimizer and write the next version."""
        self._learn()
        before, self.published = self.published, self._write_whole()
        self.version += 1
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.published.items():
            bits = tensor.flatten().view(torch.int16)  # 0.0 and -0.0 are equal, but not their bytes
            at = (bits != before[name].flatten().view(torch.int16)).nonzero()[:, 0]
            if len(at):
                found |= {name + AT: at, name + TO: tensor.flatten()[at]}
        save_file(found, self.changes, {"base": str(self.version - 1), "version": str(self.version)})

    def _learn(self) -> None:
        for weight in self._weights.values():
            weight.grad = torch.randn(weight.shape, generator=self._random)
        self._optimizer.step()

    def _write_whole(self) -> dict[str, torch.Tensor]:
        found = {name: weight.detach().bfloat16() for name, weight in self._weights.items()}
        save_file(found, self.whole / "model.safetensors", {"format": "pt"})
        return found


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine to measure, and of a server its process with the weights and a load by its own loader."""

    engine: InferenceEngine
    pid: int | None = None
    load_from_disk: Callable[[Path, int], None] | None = None


Open = Callable[[Path], AbstractAsyncContextManager[Opened]]  # takes the folder of a version
Step = Callable[[], Coroutine[Any, Any, float]]


def rows(
    *, repeats: int = 7, sglang: Path = NONE, shm: Path = SHARED_MEMORY, model: PretrainedConfig = MEDIUM
) -> list[Row]:
    """Compare the sides on each engine, medians over `repeats` rounds. `sglang` is an environment's folder."""

    def compare(kind: str, open_engine: Open) -> list[Row]:
        with workplace(shm) as folder:
            return asyncio.run(_compare(kind, open_engine, VersionWriter(folder, model), repeats))

    found = compare("local", _open_local)
    if sglang == NONE:
        missing = "not measured: name the folder of an environment with SGLang, e.g. sglang=.venv-sglang"
        return [*found, *(Row(name, None, "x", missing) for name in ROWS if name.endswith("sglang"))]
    return [*found, *compare("sglang", lambda whole: _open_sglang(whole, sglang / "bin/python"))]


@asynccontextmanager
async def _open_local(whole: Path) -> AsyncIterator[Opened]:
    engine = LocalEngine(whole, max_batch=1, max_len=MAX_LEN, kv_capacity=MAX_LEN)
    await engine.start()
    try:
        yield Opened(engine)
    finally:
        await engine.close()


@asynccontextmanager
async def _open_sglang(whole: Path, python: Path) -> AsyncIterator[Opened]:
    spec = replica_server(
        python,
        whole,
        whole.parent / "sglang.log",
        max_batch=1,
        max_len=MAX_LEN,
        kv_capacity=MAX_LEN,
        device=Device.CPU,
    )
    async with SGLangServer(spec) as server:
        served = Served(vocab=json.loads((whole / "config.json").read_text())["vocab_size"], max_len=MAX_LEN)
        engine = SGLangEngine(server.url, api_key=server.api_key, served=served, stall_timeout_s=60)
        await engine.start()

        def load_from_disk(folder: Path, version: int) -> None:
            """Load by the format `safetensors`, which our plugin leaves to SGLang."""
            body = {"model_path": str(folder), "load_format": "safetensors", "flush_cache": False}
            body["weight_version"] = str(version)
            headers = {"Authorization": f"Bearer {server.api_key}", "Content-Type": "application/json"}
            urlopen(Request(f"{server.url}/update_weights_from_disk", json.dumps(body).encode(), headers)).close()

        processes = psutil.Process(server.pid).children(recursive=True)
        scheduler = next(one for one in processes if "scheduler" in " ".join(one.cmdline()))
        try:
            yield Opened(engine, scheduler.pid, load_from_disk)
        finally:
            await engine.close()


async def _compare(kind: str, open_engine: Open, publisher: VersionWriter, repeats: int) -> list[Row]:
    """Prove 20 versions by changes, then let the sides of one engine take turns."""
    async with open_engine(publisher.whole) as opened:
        engine, loop = opened.engine, asyncio.get_running_loop()
        await engine.load_weights(publisher.whole, publisher.version)
        for _ in range(VERSIONS):
            publisher.step()
            await engine.load_changes(await engine.check_changes([publisher.changes], publisher.version))
        changed = await engine.checksum()
        await engine.load_weights(publisher.whole, publisher.version)
        assert await engine.checksum() == changed, f"{VERSIONS} versions by changes differ from the last version"
        extra: list[float] = []
        checks_s: list[float] = []

        async def delta() -> float:
            publisher.step()
            before = _memory(opened.pid, reset=True)
            began_s = time.perf_counter()
            changes = await engine.check_changes([publisher.changes], publisher.version)
            checks_s.append(time.perf_counter() - began_s)
            elapsed_s = await _standing_s(engine.load_changes(changes))
            extra.append((_memory(opened.pid) - before) / publisher.bound_bytes)
            return elapsed_s

        async def full() -> float:
            return await _standing_s(engine.load_weights(publisher.whole, publisher.version))

        async def disk() -> float:
            assert opened.load_from_disk is not None
            load = asyncio.to_thread(opened.load_from_disk, publisher.whole, publisher.version)
            return await _standing_s(load)

        def side(step: Step) -> Callable[[int], float]:
            return lambda _: asyncio.run_coroutine_threadsafe(step(), loop).result()

        sides = {"delta": side(delta), "full": side(full)}
        if opened.load_from_disk is not None:
            sides["disk"] = side(disk)
        times = await asyncio.to_thread(in_turn, sides, rounds=repeats, warm=1)
    words = f"the check of changes before took {1000 * median(checks_s):.0f} ms"
    return _rows(kind, publisher, times, max(extra), words)


def _rows(
    kind: str, publisher: VersionWriter, times: Mapping[str, Sequence[float]], extra: float, words: str
) -> list[Row]:
    """Make the rows of an engine from the seconds of each side, round by round."""
    conditions = (
        f"{publisher.parameters / 1e6:.0f}M parameters in bf16, AdamW at {LR:g}, {publisher.share:.2%} of the"
        f" values changed; a drained engine (`drain`); {VERSIONS} versions by changes had the checksum"
        f" of a whole load; {words}; "
        + ", ".join(f"{name} {1000 * median(found):.0f} ms" for name, found in times.items())
    )
    rows = [Ratio.between(times["delta"], times["full"]).row(f"refresh_delta_over_full_{kind}", conditions)]
    if "disk" in times:
        bound = f"{conditions}; most of all rounds, resident memory over the delta plus the largest tensor"
        rows.append(Row(f"refresh_extra_over_bound_{kind}", extra, "x", bound))
        rows += [
            Ratio.between(times[one], times["disk"]).row(f"refresh_{one}_over_disk_{kind}", conditions)
            for one in ("full", "delta")
        ]
    return rows


async def _standing_s(load: Awaitable[None]) -> float:
    """Return the seconds of a load, for which a drained engine stands still."""
    began_s = time.perf_counter()
    await load
    return time.perf_counter() - began_s


def _memory(pid: int | None, *, reset: bool = False) -> int:
    """Return the most resident bytes of a process since the last `reset`; with it, the resident bytes now."""
    if pid is None:
        return 0
    if reset:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
