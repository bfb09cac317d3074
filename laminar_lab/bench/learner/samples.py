"""Trajectories of both engines with their recorded masks and experts. `agreement` compares the learner with them.

Tokens, log-probabilities, masks and experts of a trajectory are as its engine gave them.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from laminar_lab.bench.engine.sglang import connected, cpu_server, find_python
from laminar_lab.bench.report import log_line
from laminar_lab.calibration.learner import make_trajectory
from laminar_py.config import ConfigError
from laminar_py.engines import read_sizes
from laminar_py.engines.local import LocalEngine
from laminar_py.engines.sglang import Served
from laminar_py.records import GenerateRequest, InferenceEngine, Recording, SamplingParams, Trajectory
from laminar_py.records.pieces import join_masks

MAX_LEN = 256
LENGTH = 200  # response tokens of a trajectory
PROMPT = np.arange(1, 17, dtype=np.int32)
BATCH = 16


@dataclass(frozen=True, slots=True)
class Draw:
    """Way to draw trajectories, e.g. `Draw()`, or `Draw((Recording.SAMPLING_MASK,), {"top_k": 50})`."""

    record: tuple[Recording, ...] = ()
    cut: Mapping[str, float] = field(default_factory=dict)  # fields of `SamplingParams`


def find_sglang() -> Path | None:
    """Return the interpreter with SGLang; without one, a line says that the embedded engine stands alone."""
    try:
        return find_python()
    except ConfigError as error:
        log_line(f"the embedded engine alone, without SGLang: {error}")
        return None


def sample_embedded(
    model: Path, draws: Sequence[Draw], *, tokens: int, router_noise: torch.Tensor | None = None
) -> list[list[Trajectory]]:
    """Sample `tokens` tokens or a few more for each draw; `router_noise` as in `LocalEngine`."""

    async def run() -> list[list[Trajectory]]:
        out = []
        for draw in draws:
            engine = LocalEngine(
                model,
                max_batch=BATCH,
                max_len=MAX_LEN,
                kv_capacity=BATCH * MAX_LEN,
                record=draw.record,
                router_noise=router_noise,
            )
            await engine.start()
            await engine.load_weights(model, 1)
            out.append(await _sample(engine, draw, tokens=tokens))
            await engine.close()
        return out

    return asyncio.run(run())


def sample_sglang(model: Path, draws: Sequence[Draw], *, tokens: int, python: Path) -> list[list[Trajectory]]:
    """Sample as `sample_embedded`, from a server on this machine's CPU, which `python` runs."""
    sizes = read_sizes(model)
    record = tuple({record for draw in draws for record in draw.record})

    async def run() -> list[list[Trajectory]]:
        out = []
        async with cpu_server(python, model, slots=BATCH, max_len=MAX_LEN, record=record) as server:
            for draw in draws:
                served = Served(
                    vocab=sizes.vocab_size,
                    max_len=MAX_LEN,
                    experts_top_k=sizes.num_experts_per_tok,
                    record=draw.record,
                )
                async with connected(server, served) as engine:
                    out.append(await _sample(engine, draw, tokens=tokens))
        return out

    return asyncio.run(run())


async def _sample(engine: InferenceEngine, draw: Draw, *, tokens: int) -> list[Trajectory]:
    streams = [_trajectory(engine, index, draw) for index in range(-(-tokens // LENGTH))]
    return list(await asyncio.gather(*streams))


async def _trajectory(engine: InferenceEngine, index: int, draw: Draw) -> Trajectory:
    """Sample one trajectory of `LENGTH` tokens; the recorded masks and experts are as the engine reports them."""
    sampling = msgspec.structs.replace(SamplingParams(max_new_tokens=LENGTH, seed=index), **draw.cut)
    request = GenerateRequest(
        rid=f"t{index}.0",
        group_id=f"t{index}",
        prompt_ids=PROMPT,
        prefix_ids=np.empty(0, np.int32),
        sampling=sampling,
    )
    deltas = [delta async for delta in engine.generate(request)]
    masks = [delta.sampling_mask for delta in deltas if delta.sampling_mask is not None]
    return msgspec.structs.replace(
        make_trajectory(index, LENGTH + len(PROMPT), prompt=PROMPT),
        response_ids=np.concatenate([delta.ids for delta in deltas]),
        logprobs=np.concatenate([delta.logprobs for delta in deltas]),
        sampling_mask=join_masks(masks) if masks else None,
        routed_experts=deltas[-1].routed_experts,
    )
