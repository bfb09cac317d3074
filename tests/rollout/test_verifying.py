"""Hashes of an engine's tensors follow the published files, or the tensor that stayed is named."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from laminar_py.records.engine import Delta, GenerateRequest, SamplingParams
from laminar_py.records.proofs import WeightsChecksum
from laminar_py.rollout.verifying import SEVERAL_LOADS, Prober, TensorWatch

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
)


def write(folder: Path, values: dict[str, float]) -> Path:
    folder.mkdir(parents=True)
    save_file({name: torch.full((4, 4), value) for name, value in values.items()}, folder / "model.safetensors")
    return folder


async def stale(
    folder: Path, versions: list[tuple[dict[str, float], dict[str, str]]], *, total: str = "x"
) -> list:
    """What each of `versions`, given as (file values, engine hashes), leaves stale."""
    watch = TensorWatch()
    return [
        await watch.stale(write(folder / str(number), values), WeightsChecksum(total, hashes))
        for number, (values, hashes) in enumerate(versions)
    ]


def hashes(value: object, **other: object) -> dict[str, str]:
    return {name: str(other.get(name.split(".")[-2], value)) for name in NAMES}


async def test_a_tensor_that_stays_while_its_file_changes_is_named(tmp_path: Path) -> None:
    first, second = dict.fromkeys(NAMES, 1.0), dict.fromkeys(NAMES, 2.0)
    same = second | {NAMES[0]: 1.0}  # this file did not change, so this tensor may stay
    assert await stale(
        tmp_path,
        [
            (first, hashes(1)),
            (second, hashes(2, up_proj=1)),
            (first, hashes(3)),
            (second, hashes(3)),
            (same, hashes(4)),
        ],
    ) == [(), (NAMES[2],), (), NAMES, ()]


@pytest.mark.parametrize(
    ("tensor", "file"),
    [
        ("model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.gate_proj.weight"),
        ("lm_head.weight", "model.embed_tokens.weight"),
        ("model.layers.0.mlp.experts.w13_weight", "model.layers.0.mlp.experts.7.up_proj.weight"),
        ("model.layers.0.mlp.experts.w2_weight", "model.layers.0.mlp.experts.7.down_proj.weight"),
        ("1/model.norm.weight", "model.norm.weight"),
    ],
)
async def test_tensors_that_an_engine_fuses_are_those_of_their_files(
    tmp_path: Path, tensor: str, file: str
) -> None:
    versions = [({file: float(number)}, {tensor: "1"}) for number in range(2)]
    assert (await stale(tmp_path, versions))[-1] == (tensor,)


async def test_a_part_on_one_of_several_gpus_may_stay_once(tmp_path: Path) -> None:
    versions = [({NAMES[1]: float(number)}, {f"1/{NAMES[1]}": "1"}) for number in range(SEVERAL_LOADS + 1)]
    found = await stale(tmp_path, versions, total="x-y")
    assert found == [()] * SEVERAL_LOADS + [(f"1/{NAMES[1]}",)]


async def test_an_engine_that_tells_no_tensors_is_not_accused(tmp_path: Path) -> None:
    assert await stale(tmp_path, [(dict.fromkeys(NAMES, value), {}) for value in (1.0, 2.0)]) == [(), ()]


class Answering:
    """Answers one token to each request, or never."""

    def __init__(self, *, never: bool = False) -> None:
        self.requests: list[GenerateRequest] = []
        self._never = never

    async def generate(self, request: GenerateRequest):
        self.requests.append(request)
        if self._never:
            await asyncio.Event().wait()
        yield Delta(rid=request.rid, ids=np.array([7], np.int32), logprobs=np.array([-0.5], np.float32), version=3)


async def test_a_probe_is_a_request_like_any_other_for_one_token() -> None:
    engine, sampling = Answering(), SamplingParams(max_new_tokens=40, temperature=0.7, seed=1)
    prompts = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    answers = await Prober(engine, prompts, sampling, replica=2).answers(3)
    assert {(answer.version, answer.probe, answer.token, answer.logprob) for answer in answers} == {
        (3, 0, 7, -0.5),
        (3, 1, 7, -0.5),
    }
    assert {request.sampling.temperature for request in engine.requests} == {0.7}
    assert {request.sampling.max_new_tokens for request in engine.requests} == {1}
    assert len({request.sampling.seed for request in engine.requests}) == len(engine.requests) == len(answers)


async def test_an_engine_without_a_place_for_probes_gives_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar_py.rollout.verifying.PROBE_S", 0.05)
    sampling = SamplingParams(max_new_tokens=1)
    assert await Prober(Answering(never=True), [np.array([1], np.int32)], sampling, replica=0).answers(0) == []
