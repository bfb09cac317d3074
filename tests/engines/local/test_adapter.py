"""The embedded engine on adapters that peft itself has written: the laws of every engine, and merging."""

import json
from contextlib import asynccontextmanager
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from laminar_py.engines.local.engine import LocalEngine
from laminar_py.records.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_digest
from tests.engines.engine_conformance import LAWS, Rig, collect, make_request
from tests.engines.local.test_engine import MODELS, ROOM, VOCAB, assert_law_4, random_prompt, save_model, serving

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path, base: Path, *, seed: int = 0, targets: tuple[str, ...] = TARGETS, rank: int = 4
) -> Path:
    """Random adapters of `base`, as large as its weights."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=8, target_modules=list(targets))
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.15 * torch.randn_like(parameter)
    (written,) = model.peft_config.values()
    written.base_model_name_or_path, written.revision = str(base), base_digest(base)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> tuple[Path, Path]:
    """Two versions."""
    root = tmp_path_factory.mktemp("adapters")
    return save_adapter(root / "a", base), save_adapter(root / "b", base, seed=1)


@asynccontextmanager
async def merged(base: Path, *versions: Path):
    """A started engine that has loaded these, numbered from 1."""
    async with serving(base) as engine:
        for version, folder in enumerate(versions, 2):
            await engine.load_weights(folder, version)
        yield engine


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_the_embedded_engine_keeps_the_law_on_adapters(law, base, adapters):
    @asynccontextmanager
    async def make():
        engine = LocalEngine(base, **ROOM)
        await engine.start()
        await engine.load_weights(adapters[0], 1)
        try:
            yield Rig(engine, adapters, VOCAB, ROOM["max_batch"], ROOM["max_len"])
        finally:
            await engine.close()

    await law(make)


DENSE = [kind for kind in MODELS if "moe" not in kind]
MIXTURES = [kind for kind in MODELS if "moe" in kind]
CASES = [(kind, targets) for kind in DENSE for targets in (TARGETS, ("gate_proj", "down_proj"))]


@pytest.mark.parametrize(("kind", "targets"), [*CASES, *[(kind, ("k_proj",)) for kind in MODELS]], ids=str)
async def test_logprobs_of_a_merge_agree_with_a_forward_through_base_and_adapters(kind, targets, tmp_path):
    base = save_model(tmp_path / "base", kind)
    folder = save_adapter(tmp_path / "adapter", base, targets=targets)
    prompt = random_prompt(0, 30)
    async with merged(base, folder) as engine:
        plain = await collect(engine, make_request(prompt=prompt, length=100, temperature=1.0, seed=3))
    assert_law_4(folder, prompt, plain)


@pytest.mark.parametrize("kind", MIXTURES)
async def test_adapters_of_experts_are_refused_by_name(kind, tmp_path):
    base = save_model(tmp_path / "base", kind)
    folder = save_adapter(tmp_path / "adapter", base, targets=("k_proj",))
    changed(target_modules=["k_proj", "up_proj"])(folder)
    async with serving(base) as engine:
        with pytest.raises(ValueError, match="adapters of up_proj; adapt only q_proj, k_proj, v_proj, o_proj"):
            await engine.load_weights(folder, 2)


async def test_what_is_served_depends_on_no_version_before(base, adapters, tmp_path):
    """After a hundred others the tensors are bit for bit those of a fresh engine, and the base is intact."""
    other_rank = save_adapter(tmp_path / "other", base, rank=2, targets=("v_proj", "up_proj"))
    async with merged(base, *[adapters[i % 2] for i in range(100)], other_rank, adapters[0]) as engine:
        found = (await engine.checksum()).total
        await engine.load_weights(base, 200)
        whole = (await engine.checksum()).total
    async with merged(base, adapters[0]) as fresh:
        assert (await fresh.checksum()).total == found
    async with serving(base) as fresh:
        assert (await fresh.checksum()).total == whole != found


async def test_a_bf16_base_is_merged_in_fp32_and_rounded_once(base, tmp_path):
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(base).bfloat16().save_pretrained(half)
    folder = save_adapter(tmp_path / "adapter", half)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32), folder)
    model.merge_and_unload().bfloat16().save_pretrained(tmp_path / "whole")
    prompt = random_prompt(0, 40)
    request = make_request(prompt=prompt, length=60, temperature=1.0)
    async with merged(half, folder) as engine, serving(tmp_path / "whole") as reference:
        found, expected = await collect(engine, request), await collect(reference, request)
    assert found.ids == expected.ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=2e-2)


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]
    save_file(tensors, folder / ADAPTER_WEIGHTS)


def with_a_head(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 2)}, folder / ADAPTER_WEIGHTS)


def changed(**fields):
    def change(folder: Path) -> None:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config | fields))

    return change


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (without_a_tensor, r"layers\.1\.mlp\.up_proj\.lora_B\.weight is missing"),
        (with_a_head, r"lm_head\.lora_A\.weight belongs to another model"),
        (changed(r=5), r"lora_A\.weight has shape \(4, 64\), but its layer needs \(5, 64\)"),
        (changed(target_modules=["lm_head"]), r"adapters of lm_head"),
        (changed(use_dora=True), r"adapter_config\.json: .*use_dora"),
        (changed(revision="0" * 64), r"the weights here differ from the learner's"),
        (changed(base_model_name_or_path="/none", revision="0" * 64), r"base=/none: no \*\.safetensors"),
    ],
    ids=["tensor missing", "tensor too many", "rank", "target", "dora", "other base", "no base"],
)
async def test_adapters_that_do_not_fit_leave_the_old_weights_serving(base, adapters, tmp_path, spoil, fault):
    folder = save_adapter(tmp_path / "spoilt", base)
    spoil(folder)
    async with merged(base, adapters[0]) as engine:
        before = (await engine.checksum()).total
        with pytest.raises(ValueError, match=fault):
            await engine.load_weights(folder, 9)
        assert (await engine.checksum()).total == before
        assert engine.status().version == 2
