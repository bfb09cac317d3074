"""The embedded engine: the laws of every engine, and its own about log-probabilities, memory and sampling."""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from laminar_py.config.loading import parse_config
from laminar_py.config.section import ConfigError
from laminar_py.engines.local.backend import LOCAL
from laminar_py.engines.local.engine import LocalEngine
from laminar_py.engines.local.model import LocalModel
from laminar_py.records.engine import EngineLostError, PauseMode
from laminar_py.records.pieces import Recording
from laminar_py.records.trajectory import FinishReason
from tests.engines.engine_conformance import (
    LAWS,
    PATIENCE_S,
    Response,
    Rig,
    a_lost_engine_says_so_in_every_method,
    caught,
    collect,
    make_request,
    until,
)
from tests.engines.recording_conformance import RECORDING_LAWS, experts_of, own_choice

torch.set_num_threads(1)

VOCAB = 123
ROOM = {"max_batch": 8, "max_len": 2048, "kv_capacity": 8 * 2048, "stream_interval": 8}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROPE = {"rope_type": "default", "rope_theta": 50_000.0}
MODELS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
    "qwen3_tied": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **SIZES,
            head_dim=16,
            tie_word_embeddings=True,
            attention_bias=True,
            rope_parameters=ROPE,
            rms_norm_eps=1e-3,
        ),
    ),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True)),
    "qwen3_moe_bias": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=16)),
    "llama_bias": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
}


def save_model(folder: Path, kind: str = "qwen3", *, seed: int = 0, **settings: int) -> Path:
    """A random model whose norms and biases are random too; `settings` are of its config."""
    torch.manual_seed(seed)
    architecture, config = MODELS[kind]
    model = architecture(type(config).from_dict(config.to_dict() | settings) if settings else config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Two versions of the same model."""
    root = tmp_path_factory.mktemp("models")
    return save_model(root / "a"), save_model(root / "b", seed=1)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> tuple[Path, Path]:
    """Two versions of the same mixture."""
    root = tmp_path_factory.mktemp("mixtures")
    return save_model(root / "a", "qwen3_moe"), save_model(root / "b", "qwen3_moe", seed=1)


@asynccontextmanager
async def serving(folder: Path, **room):
    """A started engine that serves `folder` as version 1."""
    engine = LocalEngine(folder, **{**ROOM, **room})
    await engine.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await engine.load_weights(folder, 1)
            yield engine
    finally:
        await engine.close()


def hf_logprobs(folder: Path, prompt, response: list[int], *, temperature: float = 1.0) -> list[float]:
    """Log-probabilities of `response` after `prompt`, by a full forward of the real implementation."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0] / temperature, -1)
    return logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()


def assert_law_4(folder: Path, prompt, response: Response) -> None:
    assert response.logprobs == pytest.approx(hf_logprobs(folder, prompt, response.ids), abs=1e-4)


def random_prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def factory(folders, **room):
    @asynccontextmanager
    async def make():
        async with serving(folders[0], **room) as engine:
            yield Rig(engine, folders, VOCAB, ROOM["max_batch"], ROOM["max_len"])

    return make


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", ["dense", "mixture"])
async def test_the_embedded_engine_keeps_the_law(law, kind, folders, mixtures):
    await law(factory(folders if kind == "dense" else mixtures))


async def test_a_lost_engine_says_so_in_every_method(folders):
    def kill(engine):
        engine._scheduler.step = lambda: 1 / 0

    await a_lost_engine_says_so_in_every_method(factory(folders), kill)


@pytest.mark.parametrize("law", RECORDING_LAWS, ids=lambda law: law.__name__)
async def test_the_embedded_engine_keeps_the_law_of_recording(law, mixtures):
    await law(factory(mixtures, record=(Recording.ROUTED_EXPERTS,)))


@pytest.mark.parametrize("kind", MODELS)
async def test_logprobs_agree_with_a_full_forward_in_a_crowded_batch(kind, tmp_path):
    folder = save_model(tmp_path, kind)
    prompts = [random_prompt(i // 4, 1 + 13 * (i // 4)) for i in range(24)]
    async with serving(folder) as engine:
        requests = [
            make_request(f"r{i}", group=f"g{i // 4}", prompt=prompt, length=10 + 7 * i, temperature=1.0, seed=i)
            for i, prompt in enumerate(prompts)
        ]
        responses = await asyncio.gather(*(collect(engine, request) for request in requests))
    for prompt, response in zip(prompts, responses, strict=True):
        assert_law_4(folder, prompt, response)


async def test_a_bf16_model_is_served_in_bf16(folders, tmp_path):
    AutoModelForCausalLM.from_pretrained(folders[0]).bfloat16().save_pretrained(tmp_path)
    prompt = random_prompt(0, 40)
    async with serving(tmp_path) as engine:
        response = await collect(engine, make_request(prompt=prompt, length=100, temperature=1.0))
    exact = hf_logprobs(folders[0], prompt, response.ids)
    assert response.logprobs == pytest.approx(exact, abs=0.15)
    assert response.logprobs != pytest.approx(exact, abs=1e-4)


async def test_logprobs_agree_after_a_resume_by_prefix(folders):
    prompt, prefix = random_prompt(0, 40), random_prompt(1, 77)
    async with serving(folders[0]) as engine:
        response = await collect(engine, make_request(prompt=prompt, prefix=prefix, length=177, temperature=1.0))
    assert_law_4(folders[0], prompt + prefix, response)


async def test_logprobs_agree_with_each_version_around_a_retraction(folders):
    prompt = random_prompt(0, 10)
    async with serving(folders[0]) as engine:
        request = await caught(engine, make_request(prompt=prompt, length=900, temperature=1.0))
        await engine.pause(PauseMode.RETRACT)
        await engine.load_weights(folders[1], 2)
        await engine.resume()
        response = await request.response()
    cut = response.versions.index(2)
    before, after = (hf_logprobs(folder, prompt, response.ids) for folder in folders)
    assert response.logprobs == pytest.approx(before[:cut] + after[cut:], abs=1e-4)


async def test_logprobs_agree_at_another_temperature(folders):
    async with serving(folders[0]) as engine:
        plain, cold = await asyncio.gather(
            collect(engine, make_request("plain", temperature=1.0)),
            collect(engine, make_request("cold", temperature=0.6)),
        )
    assert_law_4(folders[0], (3, 4, 5), plain)
    assert cold.logprobs == pytest.approx(hf_logprobs(folders[0], (3, 4, 5), cold.ids, temperature=0.6), abs=1e-4)


async def test_a_full_cache_retracts_the_youngest_and_loses_nothing(folders):
    prompts = [random_prompt(i, 20 + i) for i in range(12)]
    requests = [
        make_request(f"r{i}", prompt=prompt, length=150, temperature=1.0, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    async with serving(folders[0], max_len=256, kv_capacity=400) as engine:
        tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
        while not all(task.done() for task in tasks):
            assert engine.status().kv_used <= 400
            await asyncio.sleep(0)
        tight = [task.result() for task in tasks]
    async with serving(folders[0]) as engine:
        roomy = await asyncio.gather(*(collect(engine, request) for request in requests))
    assert [response.ids for response in tight] == [response.ids for response in roomy]
    for prompt, response in zip(prompts, tight, strict=True):
        assert_law_4(folders[0], prompt, response)


async def test_a_sampled_response_is_reproducible_through_crowds_and_interruptions(folders):
    def request(rid, **kwargs):
        return make_request(rid, length=120, temperature=1.0, seed=7, **kwargs)

    async with serving(folders[0]) as engine:
        whole = await collect(engine, request("whole"))
        crowd = [collect(engine, make_request(f"r{i}", length=90, temperature=1.0, seed=i)) for i in range(6)]
        crowded, *_ = await asyncio.gather(collect(engine, request("crowded")), *crowd)
        rest = await collect(engine, request("rest", prefix=whole.ids[:50]))
    assert crowded.ids == whole.ids
    assert rest.ids == whole.ids[50:]


async def test_siblings_with_other_seeds_differ(folders):
    requests = [make_request(f"r{i}", group="g", length=30, temperature=1.0, seed=i) for i in range(8)]
    async with serving(folders[0]) as engine:
        responses = await asyncio.gather(*(collect(engine, request) for request in requests))
    assert len({tuple(response.ids) for response in responses}) == 8


async def test_a_group_is_prefilled_once(folders, monkeypatch):
    prefilled = []
    prefill = LocalModel.prefill

    def counting(self, ids, positions, *, attention):
        prefilled.append(len(ids))
        prefill(self, ids, positions, attention=attention)

    monkeypatch.setattr(LocalModel, "prefill", counting)
    requests = [make_request(f"r{i}", group="g", prompt=random_prompt(0, 50)) for i in range(20)]
    async with serving(folders[0]) as engine:
        await engine.pause(PauseMode.RETRACT)
        tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
        await until(lambda: engine.status().waiting == len(requests))
        await engine.resume()
        await asyncio.gather(*tasks)
    # Eight slots at a time, all ending together: each round of admissions prefills once.
    assert prefilled == [49, 49, 49]


async def test_a_sibling_does_not_copy_the_cache_of_older_weights(folders):
    prompt = random_prompt(0, 50)
    async with serving(folders[0]) as engine:
        old = await caught(engine, make_request("old", group="g", prompt=prompt, length=1900))
        await engine.pause(PauseMode.IN_PLACE)
        await engine.load_weights(folders[1], 2)
        await engine.resume()
        new = await collect(engine, make_request("new", group="g", prompt=prompt))
        await engine.abort("old")
        await old.response()
    assert_law_4(folders[1], prompt, new)


async def test_experts_are_those_that_the_tokens_were_drawn_with_whatever_a_retraction_computes_again(mixtures):
    async with serving(mixtures[0], record=(Recording.ROUTED_EXPERTS,)) as engine:
        request = await caught(engine, make_request(length=900, temperature=1.0))
        await engine.pause(PauseMode.RETRACT)
        await engine.load_weights(mixtures[1], 2)
        await engine.resume()
        response = await request.response()
    cut = 2 + response.versions.index(2)  # positions that were inputs under the old weights
    before, after = (own_choice(folder, [3, 4, 5, *response.ids]) for folder in mixtures)
    assert not np.array_equal(before[:cut], after[:cut])
    found = np.sort(experts_of(response).table, -1)
    np.testing.assert_array_equal(found, np.concatenate([before[:cut], after[cut:]]))


async def test_a_retracted_request_that_is_aborted_in_the_queue_gives_the_experts_it_has(mixtures):
    async with serving(mixtures[0], record=(Recording.ROUTED_EXPERTS,)) as engine:
        request = await caught(engine, make_request(length=1900))
        await engine.pause(PauseMode.RETRACT)
        await engine.abort("r")
        response = await request.response()
    assert experts_of(response).positions == 3 + len(response.ids) - 1


async def test_of_many_experts_each_takes_two_bytes(tmp_path):
    sizes = {**SIZES, **EXPERTS, "num_experts": 300}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path)
    async with serving(tmp_path, record=(Recording.ROUTED_EXPERTS,)) as engine:
        response = await collect(engine, make_request(length=40))
    experts = experts_of(response)
    assert experts.width == 2
    np.testing.assert_array_equal(np.sort(experts.table, -1), own_choice(tmp_path, [3, 4, 5, *response.ids]))


async def test_files_that_do_not_fit_leave_the_old_weights_serving(folders, tmp_path):
    tensors = load_file(folders[1] / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    async with serving(folders[0]) as engine:
        before = await collect(engine, make_request())
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj"):
            await engine.load_weights(tmp_path, 2)
        after = await collect(engine, make_request())
    assert (after.ids, after.versions) == (before.ids, [1] * 20)


async def test_weights_in_several_files_are_one_version(folders, tmp_path):
    tensors = load_file(folders[0] / "model.safetensors")
    for index, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, tmp_path / f"part-{index}.safetensors")
    async with serving(folders[0]) as engine:
        whole = await collect(engine, make_request())
        await engine.load_weights(tmp_path, 2)
        assert (await collect(engine, make_request())).logprobs == whole.logprobs


async def test_the_checksum_is_that_of_the_weights_whatever_was_served_before(folders):
    engine = LocalEngine(folders[0], **ROOM)
    await engine.start()
    checksums = [(await engine.checksum()).total]
    for version, folder in enumerate((folders[0], folders[1], folders[0]), 1):
        await engine.load_weights(folder, version)
        checksums.append((await engine.checksum()).total)
    await engine.close()
    async with serving(folders[1]) as fresh:
        assert checksums[2] == (await fresh.checksum()).total
    assert checksums[0] == "unloaded"
    assert checksums[1] == checksums[3] != checksums[2]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"])
async def test_the_checksum_tells_the_last_bit_of_one_weight(folders, tmp_path, name):
    tensors = load_file(folders[0] / "model.safetensors")
    last = tensors[name].view(-1)[-1:]
    last.copy_(torch.nextafter(last, last + 1))
    save_file(tensors, tmp_path / "model.safetensors")
    async with serving(folders[0]) as engine:
        before = (await engine.checksum()).total
        await engine.load_weights(tmp_path, 2)
        assert (await engine.checksum()).total != before


async def test_weights_that_diverged_end_the_engine_with_their_version(folders, tmp_path):
    tensors = load_file(folders[0] / "model.safetensors")
    save_file({name: tensor * torch.nan for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    engine = LocalEngine(folders[0], **ROOM)
    await engine.start()
    await engine.load_weights(tmp_path, 3)
    for name in ("r1", "r2"):
        with pytest.raises(EngineLostError, match="embedded engine: version 3 gives logits that are not finite"):
            await collect(engine, make_request(name))
    await engine.close()


async def test_closing_ends_streams_with_their_partial(folders):
    async with serving(folders[0]) as engine:
        request = await caught(engine, make_request(length=1900))
    response = await request.response()
    assert response.reason is FinishReason.ABORT
    assert response.ids


def test_a_process_ends_although_its_engine_was_not_closed(folders):
    program = f"""
import asyncio
from pathlib import Path
from laminar_py.engines.local.engine import LocalEngine

async def main():
    await LocalEngine(Path({str(folders[0])!r}), max_batch=1, max_len=64, kv_capacity=64).start()

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"dtype": "float16"}, "float16"),
        ({"hidden_size": "large"}, "hidden_size"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [1]}, "layers that have no experts"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 20}, "moe_intermediate_size 20"),
    ],
)
def test_a_model_it_cannot_compute_is_refused_by_name(folders, tmp_path, changes, message):
    config = json.loads((folders[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=rf"model\.path={tmp_path}.*{message}"):
        LocalEngine(tmp_path, **ROOM)
    settings = {
        "name": "t",
        "steps": 1,
        "model": {"path": str(tmp_path)},
        "data": {"train": "t.jsonl"},
        "reward": {"use": ["t.py:t"]},
    }
    with pytest.raises(ConfigError, match=message):  # before a run starts too
        LOCAL.check_start(parse_config(settings))


def test_experts_of_a_model_without_any_are_refused(folders):
    with pytest.raises(ValueError, match=r"rollout\.record=routed_experts: .* has no experts"):
        LocalEngine(folders[0], **ROOM, record=(Recording.ROUTED_EXPERTS,))


def test_a_cache_too_small_for_one_trajectory_is_refused(folders):
    with pytest.raises(ValueError, match=r"rollout\.kv_capacity=100"):
        LocalEngine(folders[0], max_batch=1, max_len=128, kv_capacity=100)


@pytest.mark.parametrize(
    "changes", [{"prompt": ()}, {"prompt": (VOCAB,)}, {"prefix": (-1,)}, {"temperature": -1.0}, {"top_p": 0.0}]
)
async def test_a_request_that_means_nothing_is_refused(folders, changes):
    async with serving(folders[0]) as engine:
        with pytest.raises(ValueError, match="rid=r"):
            await collect(engine, make_request(**changes))


async def test_requests_that_are_still_being_prefilled_can_all_be_aborted(folders):
    """Prefixes of different lengths, more than one prefill batch holds, as after new weights under `resume`."""
    async with serving(folders[0], max_batch=16, max_len=600) as engine:
        prefixes = [random_prompt(index, 300 + 7 * index) for index in range(16)]
        requests = [make_request(f"r{index}", prefix=prefix, length=590) for index, prefix in enumerate(prefixes)]
        running = [asyncio.create_task(collect(engine, request)) for request in requests]
        await asyncio.sleep(0)
        await engine.pause(PauseMode.ABORT)
        responses = await asyncio.gather(*running)
        assert {response.reason for response in responses} == {FinishReason.ABORT}
        await engine.resume()
        assert (await collect(engine, make_request("after", length=5))).reason is FinishReason.LENGTH
