"""A publish by two ranks of a learner beside a publish by one rank, and the stall beside a plain copy.

Each rank is a process with one core and one thread, and has fp32 masters, of which a version has bf16. Both sides
publish the same weights, so their versions must have one digest.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, Qwen3Config

from laminar_lab.bench.relay_pair import CHUNK_BYTES, WARM_VERSIONS, receive, worker
from laminar_lab.bench.report import Ratio, Row, Side, in_turn, load_now
from laminar_lab.bench.workplace import SHARED_MEMORY, count_parameters, workplace, write_no_tokenizer
from laminar_py.config import AlgorithmConfig
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.learner import Learner, join_group
from laminar_py.relay import SPARE, Publisher, folder_name

ROWS = (
    "publish_s",
    "publish2_over_publish1",
    "publish2_cpu_over_publish1_cpu",
    "stall2_over_stall1",
    "stall_with_cast_over_memcpy",
)
RANKS = 2
COPY_BYTES = 128 * 2**20  # of a plain copy at once: more than a processor's cache
MODEL = Qwen3Config(  # 507 million parameters
    vocab_size=65_536,
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=4096,
    tie_word_embeddings=True,
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one publish, e.g. `Cost(0.12, 0.41)`."""

    stall_s: float  # of rank 0
    cpu_s: float  # of the rank that needs most; other work on the machine changes it less than wall time


def rows(*, shm: Path = SHARED_MEMORY, repeats: int = 7, model: PretrainedConfig = MODEL) -> list[Row]:
    """Publish `repeats` versions by one rank and by two in turn, after a few that warm up; files lie in `shm`.

    Takes 10 GB of memory.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < RANKS:
        return [Row(name, None, "", f"needs {RANKS} cores, one for each rank") for name in ROWS]
    costs: dict[str, list[Cost]] = {"one": [], "two": []}
    with workplace(shm) as folder:
        source = folder / "model"
        model.save_pretrained(source)
        write_no_tokenizer(source)
        with ExitStack() as stack:
            one, two = (
                stack.enter_context(_ranks(folder / name, source, cores[:count]))
                for name, count in (("one", 1), ("two", RANKS))
            )
            sides: dict[str, Side] = {
                "one": lambda turn: _publish(one, turn, costs["one"]),
                "two": lambda turn: _publish(two, turn, costs["two"]),
                "copy": lambda _: _ask(one[0], "copy"),
            }
            found = in_turn(sides, rounds=repeats, warm=WARM_VERSIONS)
            digests = [_ask(pipes[0], "digest") for pipes in (one, two)]
            num_bytes = int(_ask(one[0], "bytes"))
    assert digests[0] == digests[1], "two ranks have published other bytes than one"
    setting = (
        f"{count_parameters(model) / 1e6:.0f}M parameters, {num_bytes / 1e9:.2f} GB of bf16 from fp32 masters"
    )
    return _rows(found, {name: of_side[WARM_VERSIONS:] for name, of_side in costs.items()}, setting)


def _rows(found: dict[str, list[float]], costs: dict[str, list[Cost]], setting: str) -> list[Row]:
    """Make the rows from seconds and costs by side."""
    stalls = {side: [one.stall_s for one in of_side] for side, of_side in costs.items()}
    cpu = {side: [one.cpu_s for one in of_side] for side, of_side in costs.items()}
    conditions = (
        f"{setting} over warm pages in shared memory, one core and one thread a rank; from the call until the"
        f" version has its digest and its name: one rank {median(found['one']):.2f} s, {RANKS} ranks"
        f" {median(found['two']):.2f} s; CPU seconds of the rank that needs most {median(cpu['one']):.2f} and"
        f" {median(cpu['two']):.2f}; stalls {1000 * median(stalls['one']):.0f} and"
        f" {1000 * median(stalls['two']):.0f} ms; numpy.copyto of as many bytes"
        f" {1000 * median(found['copy']):.0f} ms; {load_now()}"
    )
    return [
        Row("publish_s", median(found["one"]), "s", conditions),
        Ratio.between(found["two"], found["one"]).row("publish2_over_publish1", conditions),
        Ratio.between(cpu["two"], cpu["one"]).row("publish2_cpu_over_publish1_cpu", conditions),
        Ratio.between(stalls["two"], stalls["one"]).row("stall2_over_stall1", conditions),
        Ratio.between(stalls["one"], found["copy"]).row("stall_with_cast_over_memcpy", conditions),
    ]


@contextmanager
def _ranks(folder: Path, model: Path, cores: list[int]) -> Iterator[list[Connection]]:
    """Start a learner of one rank for each core; yield the pipes to its ranks once all have loaded the model."""
    folder.mkdir()
    with ExitStack() as stack:
        pipes = [
            stack.enter_context(
                worker(partial(_rank, folder=folder, model=model, rank=rank, ranks=len(cores), core=core))
            )
            for rank, core in enumerate(cores)
        ]
        for pipe in pipes:
            receive(pipe)
        yield pipes


def _ask(pipe: Connection, request: str) -> float:
    """Return a rank's answer to a request without a version."""
    pipe.send(request)
    return receive(pipe)  # type: ignore[no-any-return]


def _publish(pipes: list[Connection], version: int, costs: list[Cost]) -> float:
    """Have all ranks publish a version; return the seconds until rank 0 has completed it, and add its cost."""
    used = [_ask(pipe, "cpu") for pipe in pipes]
    began = time.monotonic()
    for pipe in pipes:
        pipe.send(version)
    (ended, stall_s), *_ = [receive(pipe) for pipe in pipes]
    cpu_s = max(_ask(pipe, "cpu") - before for pipe, before in zip(pipes, used, strict=True))
    costs.append(Cost(stall_s, cpu_s))
    return float(ended) - began


def _rank(pipe: Connection, *, folder: Path, model: Path, rank: int, ranks: int, core: int) -> None:
    """Load this rank's shard; then publish each version that the pipe names, and answer other requests."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=ranks) if ranks > 1 else None
    source = ModelConfig(path=model, from_scratch=True)
    learner = Learner(source, LearnerConfig(), AlgorithmConfig(), temperature=1.0, seed=0, mesh=mesh)
    _fill(learner)
    store = folder / "store"
    publisher = None if rank else Publisher(store, chunk_bytes=CHUNK_BYTES, ranks=ranks)
    learner.ranks.sum(0.0)
    publisher = publisher or Publisher(store, chunk_bytes=CHUNK_BYTES, rank=rank, ranks=ranks)
    pages = [
        np.ones(COPY_BYTES if ranks == 1 else 0, np.uint8) for _ in range(2)
    ]  # one rank makes the plain copies
    pipe.send("ready")
    published = None
    while True:
        request = pipe.recv()
        if isinstance(request, int):
            stall_s = publisher.publish_sources(request, learner.sources(dtype=torch.bfloat16, gather=False))
            if rank == 0:
                published = publisher.completed(request)
            pipe.send((time.monotonic(), stall_s))
            if rank == 0 and request and not (store / SPARE).exists():
                (store / folder_name(request - 1)).rename(store / SPARE)
        elif request == "cpu":
            pipe.send(time.process_time())
        elif published is not None:
            answers = {"digest": published.digest, "bytes": published.num_bytes}
            pipe.send(answers[request] if request in answers else _copy_s(published.num_bytes, pages))


def _copy_s(num_bytes: int, pages: Sequence[npt.NDArray[np.uint8]]) -> float:
    """Copy so many bytes, piece by piece into warm memory; return the seconds."""
    began = time.monotonic()
    for begin in range(0, num_bytes, COPY_BYTES):
        size = min(COPY_BYTES, num_bytes - begin)
        np.copyto(pages[1][:size], pages[0][:size])
    return time.monotonic() - began


def _fill(learner: Learner) -> None:
    """Give weights values that do not depend on the number of ranks, as drawn ones do: all rows are equal."""
    with torch.no_grad():
        for parameter in learner.model.parameters():
            values = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            row = torch.arange(values.shape[-1], dtype=torch.float32).sin_()
            values.copy_(row.expand(values.shape) if values.ndim > 1 else torch.ones(len(values)))
