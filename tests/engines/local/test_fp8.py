"""Emulated fp8: e4m3 by blocks as defined, served as rounded, and never by changed positions."""

import pytest
import torch
from safetensors.torch import save_file

from laminar_py.engines.local.fp8 import BLOCK, is_quantized, rounded
from laminar_py.records.engine import RefusedError
from tests.engines.changes import nudged, read_version, write_changes
from tests.engines.engine_conformance import collect, make_request
from tests.engines.local.test_engine import hf_logprobs, random_prompt, save_model, serving

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E4M3 = E4M3[E4M3.isfinite()].unique()  # all finite values, ascending


def blocks_of(tensor):
    return [one for rows in tensor.split(BLOCK) for one in rows.split(BLOCK, dim=1)]


def test_each_value_becomes_the_nearest_e4m3_times_the_scale_of_its_block():
    torch.manual_seed(0)
    weight = torch.randn(200, 300) * torch.logspace(-6, 3, 300)
    weight[:BLOCK, :BLOCK] = 0.0
    for before, after in zip(blocks_of(weight), blocks_of(rounded(weight)), strict=True):
        before = before.bfloat16().double()  # bf16 first
        scale = before.abs().max() / 448 if before.any() else torch.tensor(1.0)
        nearest = (before.flatten()[:, None] / scale - E4M3.double()).abs().min(1).values
        torch.testing.assert_close(
            ((after.double() - before) / scale).abs().flatten(), nearest, rtol=0.0, atol=1e-4
        )


def test_a_value_changes_its_own_block_alone():
    torch.manual_seed(0)
    weight = torch.randn(2 * BLOCK, 2 * BLOCK)
    other = weight.clone()
    other[3, 5] = 1e4  # a new scale
    changed = rounded(weight) != rounded(other)
    assert changed[:BLOCK, :BLOCK].float().mean() > 0.9
    changed[:BLOCK, :BLOCK] = False
    assert not changed.any()


def as_served(folder, into):
    """A version whose values are those that fp8 serves."""
    into.mkdir()
    (into / "config.json").write_text((folder / "config.json").read_text())
    tensors = {
        name: rounded(tensor) if is_quantized(name) else tensor for name, tensor in read_version(folder).items()
    }
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen3_moe", "llama_bias"])
async def test_an_engine_computes_with_rounded_matrices_and_everything_else_as_published(kind, tmp_path):
    folder = save_model(tmp_path / "v1", kind)
    prompt, request = random_prompt(0, 40), {"length": 60, "temperature": 1.0, "seed": 1}
    async with serving(folder, quantized=True) as engine:
        response = await collect(engine, make_request(prompt=prompt, **request))
        checksum = await engine.checksum()
    async with serving(as_served(folder, tmp_path / "served")) as engine:
        assert (await engine.checksum()).tensors == checksum.tensors
    assert checksum.quantized
    assert response.logprobs == pytest.approx(hf_logprobs(tmp_path / "served", prompt, response.ids), abs=1e-4)
    assert response.logprobs != pytest.approx(hf_logprobs(folder, prompt, response.ids), abs=1e-3)


async def test_changed_positions_are_refused_and_a_whole_load_moves_each_matrix(tmp_path):
    folder = save_model(tmp_path / "v1")
    after = nudged(folder, tmp_path / "v2", share=0.1)
    file = write_changes(folder, after, tmp_path / "changes", base=1, version=2)
    async with serving(folder, quantized=True) as engine:
        before = (await engine.checksum()).tensors
        assert not engine.takes_changes
        with pytest.raises(RefusedError, match="load the whole version"):
            await engine.check_changes([file], 2)
        await engine.load_weights(after, 2)
        now = (await engine.checksum()).tensors
    assert all(now[name] != before[name] for name in before)


async def test_a_large_channel_that_its_norm_divides_back_costs_fp8_its_block(tmp_path):
    folder = save_model(tmp_path / "v1")
    tensors = read_version(folder)
    for name in tensors:
        if name.endswith("input_layernorm.weight"):
            tensors[name][0] /= 2**20
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name][:, 0] *= 2**20
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
    gaps = {}
    for quantized in (False, True):
        async with serving(large, quantized=quantized) as engine:
            prompt = random_prompt(0, 40)
            response = await collect(engine, make_request(prompt=prompt, length=60, temperature=1.0))
            exact = torch.tensor(hf_logprobs(folder, prompt, response.ids))
            gaps[quantized] = (torch.tensor(response.logprobs) - exact).abs().mean().item()
    assert gaps[False] < 1e-4
    assert gaps[True] > 0.3
