"""Visit 3, loads of a version: `python -m experiments.gpu.loads files|sglang GB [--sglang PYTHON] [--dry]`.

`files`: from safetensors files in shared memory into the GPU, by a mapping, by reads, by reads into page-locked
memory beside the copies, by safetensors itself, and as a bound a copy from page-locked memory. `sglang`: the same
files by `update_weights_from_disk` of a server, with and without `--weight-loader-disable-mmap`. The weights are
random, in bf16, of Qwen models with 1.5B (3 GB) and 7B parameters (15 GB). With `--dry` a tiny model goes into the
memory of the host.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from experiments.gpu.learner import TINY
from experiments.gpu.publish import roomy
from experiments.gpu.servers import interpreter
from experiments.gpu.steps import FULL, SEVEN_B
from laminar_lab.bench.report import Row, log_line, show
from laminar_lab.bench.workplace import SHARED_MEMORY, count_parameters, write_no_tokenizer
from laminar_py.config.cluster import Device
from laminar_py.engines.sglang.http import ServerConnection
from laminar_py.engines.sglang.launch import replica_server
from laminar_py.engines.sglang.server import SGLangServer
from laminar_py.learner.export import SHARD_BYTES

MODELS = {"3": FULL.model, "15": Qwen2Config(**SEVEN_B, num_hidden_layers=28)}
REPEATS = 3
PIECE_BYTES, PIECES = 64 * 2**20, 4  # page-locked buffers of the reads
BLOCK = 2**24  # random numbers, repeated over the weights
LOAD_S = 240.0

Files = Sequence[Path]


def write_version(folder: Path, config: PretrainedConfig) -> Files:
    """Write a folder of random bf16 weights without making the model; return its files of weights."""
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    write_no_tokenizer(folder)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, weight in model.named_parameters():
        tensor = block.repeat(-(-weight.numel() // BLOCK))[: weight.numel()].reshape(weight.shape)
        if size and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [f"model-{place:05}-of-{len(shards):05}.safetensors" for place in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    table = {weight: name for name, shard in zip(names, shards, strict=True) for weight in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return [folder / name for name in names]


def place_of(folder: Path) -> str:
    """Words for the place of a folder."""
    return (
        "in shared memory"
        if folder.is_relative_to(SHARED_MEMORY)
        else "on a disk, since shared memory has no room"
    )


# ---- ways from files to a device; each fills `target`, [bytes], and returns at the end of the last copy


def mapped(files: Files, target: Tensor) -> None:
    """Copy each tensor out of the mapped file."""
    begin = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                data = opened.get_tensor(name).flatten().view(torch.uint8)
                target[begin : begin + len(data)].copy_(data)
                begin += len(data)


def read(files: Files, target: Tensor) -> None:
    """Read each file into pageable memory and copy it."""
    begin = 0
    for file in files:
        data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        target[begin : begin + len(data)].copy_(data)
        begin += len(data)


def read_locked(files: Files, target: Tensor) -> None:
    """Read pieces into page-locked memory while earlier pieces are copied."""
    on_gpu = target.is_cuda
    buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(PIECES)]
    copied = [torch.cuda.Event() if on_gpu else None for _ in buffers]
    begin = 0
    for place, (file, offset) in enumerate(_pieces(files)):
        buffer, event = buffers[place % PIECES], copied[place % PIECES]
        if event is not None:
            event.synchronize()
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            count = opened.readinto(buffer.numpy())
        target[begin : begin + count].copy_(buffer[:count], non_blocking=True)
        if event is not None:
            event.record()
        begin += count
    if on_gpu:
        torch.cuda.synchronize()


def _pieces(files: Files) -> Iterator[tuple[Path, int]]:
    for file in files:
        for offset in range(0, file.stat().st_size, PIECE_BYTES):
            yield file, offset


def by_safetensors(files: Files, target: Tensor) -> None:
    """Have safetensors load each file to the device, as tensors of its own."""
    for file in files:
        load_file(file, device=str(target.device))


def file_rows(folder: Path, config: PretrainedConfig, *, device: str) -> list[Row]:
    """GB/s of each way, median of some loads; the first load touches the pages and does not count."""
    files = write_version(folder, config)
    num_bytes = sum(file.stat().st_size for file in files)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    what = f"{num_bytes / 1e9:.3g} GB in {len(files)} files {place_of(folder)}, to {device}, median of {REPEATS}"
    ways: dict[str, Callable[[Files, Tensor], None]] = {
        "mapped": mapped,
        "read": read,
        "read_locked": read_locked,
        "safetensors": by_safetensors,
    }
    rows = []
    for name, way in ways.items():
        found = [_timed(lambda: way(files, target), device) for _ in range(REPEATS + 1)][1:]  # noqa: B023
        rows.append(Row(f"load_{name}", num_bytes / 1e9 / median(found), "GB/s", f"{median(found):.3g} s; {what}"))
        log_line(f"{name}: {median(found):.3f} s")
    locked = torch.empty(min(num_bytes, 2**31), dtype=torch.uint8, pin_memory=device == "cuda")
    part = target[: len(locked)]
    found = [_timed(lambda: part.copy_(locked, non_blocking=True), device) for _ in range(REPEATS + 1)][1:]
    where = f"{len(locked) / 1e9:.3g} GB that lie in page-locked memory, to {device}, median of {REPEATS}"
    return [*rows, Row("copy_locked", len(locked) / 1e9 / median(found), "GB/s", where)]


def _timed(work: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


# ---- by a server


async def server_s(python: Path, folder: Path, *, device: Device, disable_mmap: bool) -> list[float]:
    """Seconds of each `update_weights_from_disk` of a new server; the first does not count."""
    spec = replica_server(
        python,
        folder,
        folder / f"server-{disable_mmap}.log",
        max_batch=4,
        max_len=512,
        kv_capacity=4096,
        device=device,
        dtype="bfloat16",
        flags={"weight-loader-disable-mmap": True} if disable_mmap else {},
        start_timeout_s=LOAD_S,
    )
    found = []
    async with SGLangServer(spec) as server:
        connection = ServerConnection(server.url, api_key=server.api_key, timeout_s=LOAD_S)
        try:
            for version in range(REPEATS + 1):
                began = time.perf_counter()
                await connection.post(
                    "update_weights_from_disk",
                    model_path=str(folder),
                    weight_version=str(version),
                    load_format="auto",
                    flush_cache=True,
                )
                found.append(time.perf_counter() - began)
        finally:
            await connection.close()
    return found[1:]


def server_rows(python: Path, folder: Path, config: PretrainedConfig, *, device: Device) -> list[Row]:
    """GB/s of a server's loads with its mapping of files and without."""
    files = write_version(folder, config)
    num_bytes = sum(file.stat().st_size for file in files)
    rows = []
    for name, disable in (("update_from_disk", False), ("update_from_disk_without_mmap", True)):
        found = asyncio.run(server_s(interpreter(python, folder), folder, device=device, disable_mmap=disable))
        what = f"{num_bytes / 1e9:.3g} GB in {len(files)} files {place_of(folder)}, median of {len(found)}"
        rows.append(Row(name, num_bytes / 1e9 / median(found), "GB/s", f"{median(found):.3g} s; {what}"))
    return rows


def main() -> None:
    """Measure loads and print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["files", "sglang"])
    parser.add_argument("gigabytes", choices=MODELS)
    parser.add_argument("--sglang", type=Path, help="interpreter of an environment with SGLang")
    parser.add_argument("--dry", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    torch.set_num_threads(1)  # copies in memory need no others, and on busy cores these wait for each other
    config = TINY.model if args.dry else MODELS[args.gigabytes]
    shm = roomy(SHARED_MEMORY, 1.2 * 2 * count_parameters(config))
    with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir=shm) as name:
        folder = Path(name) / "version"
        if args.what == "files":
            rows = file_rows(folder, config, device="cpu" if args.dry else "cuda")
        else:
            rows = server_rows(args.sglang, folder, config, device=Device.CPU if args.dry else Device.CUDA)
    show("gpu", rows, as_json=True)


if __name__ == "__main__":
    main()
