"""Memory of GPUs by formula, against counted bytes: models on the meta device, their shards, kept activations."""

import json
import re
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from laminar_lab.doctor.gpu_formula import (
    HEAD_TOKENS,
    _peaks,
    activations,
    critic_parts,
    host_inputs,
    learner_memory,
    state_parts,
)
from laminar_lab.doctor.memory import gpu_memory, host_memory, memory_faults, memory_warnings, shard_advice
from laminar_lab.model_shape import ModelShape, read_shape
from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import Accumulate, LearnerConfig, LoraConfig, Recompute, ReduceDtype
from laminar_py.config.loading import load_config
from laminar_py.learner.losses import logprob
from laminar_py.learner.model import load_policy, policy_logprobs
from tests.doctor.test_fit import doctor
from tests.learner.builders import make_learner, make_model_folder, make_sequences, pack
from tests.runs.runs import REPO

MATH = REPO / "experiments/math_long_cot"
QWEN_7B = {  # Qwen2.5-7B
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SMOLLM2 = {  # SmolLM2-135M-Instruct
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS = {
    "7B": QWEN_7B,
    "llama": SMALL | {"model_type": "llama", "tie_word_embeddings": False},
    "tied qwen2": SMALL | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": SMALL | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False},
    "qwen3 of experts": SMALL | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 32},
    "qwen2 of experts": SMALL | EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 96},
    "mixtral": SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4 of experts, dense at first": SMALL
    | {"model_type": "glm4_moe", "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16, "attention_bias": False},
    "glm4 of experts, biased": SMALL
    | {"model_type": "glm4_moe", "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16, "attention_bias": True}
    | {"use_qk_norm": True},
    "deepseek, of experts and latent attention": SMALL
    | {"model_type": "deepseek_v3", "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "q_lora_rank": 24, "kv_lora_rank": 16}
    | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "tie_word_embeddings": False},
    "deepseek, whole queries": SMALL
    | {"model_type": "deepseek_v3", "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "q_lora_rank": None, "kv_lora_rank": 16}
    | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "tie_word_embeddings": False},
    "llama, biased": SMALL | {"model_type": "llama", "tie_word_embeddings": False, "attention_bias": True},
}


def outline(folder, sizes):
    """The model as transformers builds it, on the meta device, and its shape as we read it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shape = read_shape(folder)
    assert shape is not None
    return model, shape


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name, tmp_path):
    model, shape = outline(tmp_path, MODELS[name])
    assert shape.total == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layer == sum(parameter.numel() for parameter in model.model.layers[-1].parameters())


def test_adapters_are_those_of_the_model(tmp_path):
    folder, lora = make_model_folder(tmp_path / "model"), LoraConfig(rank=4)
    shape = read_shape(folder)
    learner = make_learner(folder, settings=LearnerConfig(lora=lora))
    trained = sum(parameter.numel() for parameter in learner.model.parameters() if parameter.requires_grad)
    assert shape.adapters(lora) == trained
    parts = state_parts(shape, LearnerConfig(lora=lora))
    assert parts["masters (fp32)"] == 4 * sum(parameter.numel() for parameter in learner.model.parameters())
    assert parts["moments (fp32)"] == 8 * trained


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A group that only pretends to communicate; this is its first rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def local_bytes(tensors) -> int:
    return sum(tensor.to_local().numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.usefixtures("four_ranks")
def test_states_of_a_rank_are_the_bytes_of_its_shards(tmp_path):
    model, shape = outline(tmp_path, QWEN_7B)
    mesh = init_device_mesh("cpu", (4,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    adamw = torch.optim.AdamW(parameters, fused=False, foreach=False)
    adamw.step()
    moments = [state[name] for state in adamw.state.values() for name in ("exp_avg", "exp_avg_sq")]
    parts = state_parts(shape, LearnerConfig(world_size=4))
    assert parts["masters (fp32)"] == pytest.approx(local_bytes(parameters), rel=1e-3)
    assert parts["gradients (fp32)"] == pytest.approx(local_bytes(p.grad for p in parameters), rel=1e-3)
    assert parts["moments (fp32)"] == pytest.approx(local_bytes(moments), rel=1e-3)


def test_whole_gradients_and_those_of_a_host_count_where_they_are(tmp_path):
    shape = outline(tmp_path, QWEN_7B)[1]
    whole = state_parts(shape, LearnerConfig(world_size=4, accumulate=Accumulate.WHOLE))
    assert whole["gradients (fp32)"] == 4 * shape.total
    assert sum(state_parts(shape, LearnerConfig(world_size=4, offload=True)).values()) == 0
    assert (
        sum(state_parts(shape, LearnerConfig(world_size=4, offload=True, accumulate=Accumulate.WHOLE)).values())
        > 0
    )


@pytest.mark.parametrize("reduce_dtype", ReduceDtype)
def test_ranks_in_groups_hold_what_the_ranks_of_one_group_hold_alone(tmp_path, reduce_dtype):
    shape = outline(tmp_path, QWEN_7B)[1]
    groups = LearnerConfig(world_size=16, shard_ranks=8, reduce_dtype=reduce_dtype)
    alone = LearnerConfig(world_size=8, reduce_dtype=reduce_dtype)
    assert learner_memory(shape, groups, tokens=4096) == learner_memory(shape, alone, tokens=4096)


def test_a_sum_in_bfloat16_takes_half_the_memory_of_one_in_fp32(tmp_path):
    shape = outline(tmp_path, QWEN_7B)[1]
    both = (LearnerConfig(world_size=8, reduce_dtype=one) for one in ReduceDtype)
    (*_, of_fp32), (*_, of_bf16) = (_peaks(shape, learner, tokens=16) for learner in both)
    root = 2.0 * shape.root
    assert sum(of_fp32.values()) - root == pytest.approx(2 * (sum(of_bf16.values()) - root))


@pytest.mark.parametrize(
    ("settings", "nodes", "line"),
    [
        (
            [],
            "aaaaaaaabbbbbbbb",
            r"learner\.shard_ranks=null: .* over 2 nodes; set it to 8, .* 34\.9 of 80\.0 GB .*",
        ),
        ([], "aaaaaaaaaaaaaaaa", None),
        ([], "aaaaaaaaaaaabbbb", None),  # no group of a node's ranks has the same size on both
        ([], "abcdefghijklmnop", None),  # a rank alone holds everything
        (["packer.max_tokens=108000"], "aaaaaaaabbbbbbbb", None),  # which fits only over all ranks
        (["cluster.learner_device=cpu"], "aaaaaaaabbbbbbbb", None),
        (["learner.shard_ranks=8"], "aaaaaaaabbbbbbbb", None),
        (
            ["learner.shard_ranks=8"],
            "aaaabbbbbbbbcccc",
            r"learner\.shard_ranks=8: 2 of 2 groups .* 4, 8, 4 ranks.*",
        ),
    ],
)
def test_groups_of_a_nodes_ranks_are_advised_where_they_fit(tmp_path, settings, nodes, line):
    config = shipped("7b_8gpu", tmp_path, "learner.world_size=16", *settings)
    found = shard_advice(config, nodes, gpu_bytes=80e9)
    assert (found == []) if line is None else re.fullmatch(line, found[0])


class Kept:
    """Bytes that autograd keeps inside, each memory once, weights left out."""

    def __init__(self, model) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._found: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []  # so that no memory is used twice
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._weights:
            self._found[place] = tensor.untyped_storage().nbytes()
            self._tensors.append(tensor)
        return tensor

    def __enter__(self) -> "Kept":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(self._found.values())


def kept_by(folder, sizes) -> tuple[ModelShape, int, int]:
    """Shape, tokens, and bytes that autograd keeps of a forward pass in bf16 on a CPU."""
    shape = outline(folder, sizes)[1]
    (folder / "tokenizer.json").write_text("{}")
    drawn = ModelConfig(path=folder, from_scratch=True)
    model = load_policy(drawn, seed=0, temperature=1.0, device=torch.device("cpu")).to(torch.bfloat16)
    batch = pack(make_sequences((40, 90, 126)), num_total=3)
    with Kept(model) as kept:
        policy_logprobs(model, batch)
    return shape, len(batch.input_ids), kept.bytes


@pytest.mark.parametrize("name", ["llama", "tied qwen2", "qwen3", "qwen3 of experts", "mixtral"])
def test_activations_are_near_what_autograd_keeps(name, tmp_path):
    shape, tokens, kept = kept_by(tmp_path, MODELS[name])
    outside = 10 * tokens * shape.hidden_size  # the last norm, and what the head reads
    every = activations(shape, Recompute.NONE, tokens=tokens)
    assert kept - outside == pytest.approx(every, rel=0.15)
    entries = 2 * tokens * shape.hidden_size * shape.num_hidden_layers
    assert activations(shape, Recompute.ALL, tokens=tokens) == entries
    assert entries < activations(shape, Recompute.SELECTIVE, tokens=tokens) < every / 2


def test_an_experts_further_bytes_are_what_autograd_keeps_of_it(tmp_path):
    two, six = (
        kept_by(tmp_path / str(chosen), MODELS["qwen3 of experts"] | {"num_experts_per_tok": chosen})
        for chosen in (2, 6)
    )
    expected = [activations(shape, Recompute.NONE, tokens=tokens) for shape, tokens, _ in (two, six)]
    assert six[2] - two[2] == pytest.approx(expected[1] - expected[0], rel=0.02)


def test_a_mixtures_grouped_products_are_computed_again_where_every_second_product_is_kept(tmp_path):
    """So experts of any width keep the same."""
    narrow, wide = (
        outline(tmp_path / str(width), MODELS["qwen3 of experts"] | {"moe_intermediate_size": width})[1]
        for width in (48, 96)
    )
    kept = [activations(shape, Recompute.SELECTIVE, tokens=10) for shape in (narrow, wide)]
    assert kept[0] == kept[1] == 10 * 3 * 2 * (64 + 4 * 32 + 2 * 32 + 64)


def test_inputs_on_the_host_take_the_gpus_place_of_two_whatever_the_number_of_layers(tmp_path):
    kept, offloaded = (gpu_memory(shipped("7b_8gpu", tmp_path, f"learner.recompute={kind}"))[0] for kind in OF_ALL)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B | {"num_hidden_layers": 56}))
    tokens, of_input = kept.asked, 2 * QWEN_7B["hidden_size"]
    shape = read_shape(tmp_path)
    assert kept.parts["activations"] - offloaded.parts["activations"] == (28 - 2) * tokens * of_input
    assert activations(shape, Recompute.ALL_OFFLOADED, tokens=tokens) == 2 * tokens * of_input
    assert kept.host == 0
    assert offloaded.host == 28 * 2**27, "132 MB each, rounded up"
    assert host_inputs(shape, Recompute.ALL_OFFLOADED, tokens=tokens) == 56 * 2**27


OF_ALL = (Recompute.ALL, Recompute.ALL_OFFLOADED)
LONG = ("learner.world_size=8", "rollout.replicas=4")


def shipped(name, folder, *settings):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return load_config(MATH / f"{name}.yaml", [f"model.path={folder}", "learner.recompute=all", *settings])


@pytest.mark.parametrize("name", ["7b_8gpu", "7b_24gpu"])
def test_shipped_configs_fit_gpus_of_80_gb(name, tmp_path):
    config = shipped(name, tmp_path)
    assert [column.kind for column in gpu_memory(config)] == ["learner", "engine"]
    assert memory_faults(config) == []
    states = state_parts(read_shape(tmp_path), config.learner)
    assert sum(states.values()) == pytest.approx(16 * 7.6e9 / config.learner.world_size, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "fault", "change"),
    [
        (
            ["learner.world_size=2", "rollout.replicas=6"],
            r"learner.world_size=2: a GPU of the learner needs 8\d\.\d GB and has 80\.0; set it to 3",
            ["learner.world_size=3"],
        ),
        (
            ["learner.world_size=3", "learner.accumulate=whole"],
            r"learner.accumulate=whole: a GPU of the learner needs 8\d\.\d GB and has 80\.0; set it to sharded",
            ["learner.accumulate=sharded"],
        ),
        (
            ["learner.recompute=none"],
            r"learner.recompute=none: a GPU of the learner needs 1\d\d\.\d GB .*; set it to all",
            ["learner.recompute=all"],
        ),
        (
            ["packer.max_tokens=400000"],
            r"packer.max_tokens=400000: .* on any number of ranks; lower it to 18432",
            ["packer.max_tokens=18432"],
        ),
        (
            ["packer.max_tokens=131072", "rollout.max_len=131072", *LONG],
            r"learner.recompute=all: a GPU of the learner needs 95.5 GB and has 80.0; set it to all_offloaded",
            ["learner.recompute=all_offloaded"],
        ),
        (
            ["packer.max_tokens=262144", "rollout.max_len=262144", *LONG],
            r"packer.max_tokens=262144: .*; lower it to 65536, and let ranks share .*: learner.context_parallel=4",
            ["packer.max_tokens=65536", "learner.context_parallel=4"],
        ),
        (
            ["packer.max_tokens=262144", "rollout.max_len=262144", *LONG, "learner.recompute=all_offloaded"],
            r"packer.max_tokens=262144: .*; lower it to 131072, and let ranks .*: learner.context_parallel=2",
            ["packer.max_tokens=131072", "learner.context_parallel=2"],
        ),
        (
            ["learner.world_size=16", "learner.shard_ranks=1"],
            r"learner.shard_ranks=1: a GPU of the learner needs .* GB and has 80\.0; set it to 4",
            ["learner.shard_ranks=4"],
        ),
        (
            ["learner.world_size=2", "learner.shard_ranks=1"],
            r"learner.shard_ranks=1: .*; set it to null and learner.world_size to 3",
            ["learner.shard_ranks=null", "learner.world_size=3"],
        ),
        (
            ["rollout.kv_capacity=2500000"],
            r"rollout.kv_capacity=2500000: a GPU of the engine .* and cache may take 68\.0; set it to 2106000",
            ["rollout.kv_capacity=2106000"],
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_the_setting_and_a_value_that_fits(settings, fault, change, tmp_path):
    (line,) = memory_faults(shipped("7b_8gpu", tmp_path, *settings))
    assert re.fullmatch(fault, line), line
    assert memory_faults(shipped("7b_8gpu", tmp_path, *settings, *change)) == []


@pytest.mark.parametrize("second", ["algorithm.name=ppo", "algorithm.kl_coef=0.1"])
def test_ranks_that_share_a_microbatch_hold_the_second_model_too(second, tmp_path):
    settings = ["packer.max_tokens=262144", "rollout.max_len=262144", *LONG]
    for ranks, chosen in ((2, settings), (4, [*settings, second])):
        (line,) = memory_faults(shipped("7b_8gpu", tmp_path, *chosen), gpu_bytes=88e9, kinds=["learner"])
        assert line.endswith(f"learner.context_parallel={ranks}")


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "rollout.kv_capacity=2095000",
            "a GPU of the engine holds 79.7 of 80.0 GB by formula, which leaves less than 2%; lower rollout.kv_c",
        ),
        (
            "packer.max_tokens={fits}",
            "a GPU of the learner holds 80.0 of 80.0 GB by formula, which leaves less than 2%; raise learner.wo",
        ),
    ],
)
def test_a_run_that_fits_without_a_margin_is_warned_of(setting, line, tmp_path):
    fits = gpu_memory(shipped("7b_8gpu", tmp_path))[0].fitting
    config = shipped("7b_8gpu", tmp_path, setting.format(fits=fits))
    (warning,) = memory_warnings(config, gpu_bytes=80e9)
    assert warning.startswith(line)
    assert memory_faults(config) == []
    assert memory_faults(shipped("7b_8gpu", tmp_path, f"packer.max_tokens={fits + 1}")) != []


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        ("0::/", {"memory.max": "2000000000"}, 2e9),
        ("0::/pod/box", {"memory.max": "max", "pod/memory.max": "3000000000", "pod/box/memory.max": "max"}, 3e9),
        ("4:cpu,memory:/docker/1", {"memory/memory.limit_in_bytes": "1000000000"}, 1e9),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("1:cpu:/\n0::/", {"unified/memory.max": "max", "memory.limit_in_bytes": "5"}, None),
    ],
)
def test_memory_is_a_containers_where_it_has_a_limit(tmp_path, line, files, limit):
    (tmp_path / "own").write_text(f"{line}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    found = host_memory(cgroups=tmp_path, own=tmp_path / "own")
    assert found == (limit or psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("heads", "keys", "gpus"),
    [
        (28, 4, [1, 2, 4, 28]),
        (32, 8, [1, 2, 4, 8, 16, 32]),
        (40, 40, [1, 2, 4, 5, 8, 10, 20, 40]),
        (6, 3, [1, 3, 6]),
    ],
)
def test_a_model_is_divided_over_gpus_where_queries_and_keys_divide(heads, keys, gpus):
    shape = ModelShape(
        vocab_size=2, hidden_size=4, num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=keys
    )
    assert shape.divisions == gpus


def engine_fault(folder, model, *settings, gpu_bytes=80e9):
    config = shipped("7b_24gpu", folder, "learner.world_size=64", "rollout.replicas=1", *settings)
    (folder / "config.json").write_text(json.dumps(QWEN_7B | model))
    lines = memory_faults(config, gpu_bytes=gpu_bytes)
    return next((line for line in lines if "the engine" in line), None)


def test_a_cache_that_cannot_hold_one_trajectory_does_not_fit(tmp_path):
    cache = ["rollout.kv_capacity=null"]
    large = {"num_hidden_layers": 117}  # 57 GB of weights, 0.24 MB a token
    assert engine_fault(tmp_path, large, *cache) is None
    longer = [*cache, "rollout.max_len=65536", "packer.max_tokens=65536"]
    line = engine_fault(tmp_path, large, *longer)
    told = (
        r"rollout.engine.tensor_parallel=1: a GPU of the engine has room for \d{5} tokens of KV cache, less than"
        r" rollout.max_len=65536; set it to 2"
    )
    assert re.fullmatch(told, line), line
    assert engine_fault(tmp_path, large, *longer, "rollout.engine.tensor_parallel=2") is None


def test_the_number_of_gpus_advised_divides_the_heads(tmp_path):
    """Three would do, and 4 keys divide over 4."""
    larger = {"num_hidden_layers": 330}
    line = engine_fault(tmp_path, larger, "rollout.kv_capacity=null")
    assert line.endswith("; set it to 4"), line
    line = engine_fault(tmp_path, larger | {"num_key_value_heads": 28}, "rollout.kv_capacity=850000")
    found = re.search(r"; set it to (\d+) and rollout.kv_capacity to (\d+)$", line)
    advice = (f"rollout.engine.tensor_parallel={found[1]}", f"rollout.kv_capacity={found[2]}")
    assert engine_fault(tmp_path, larger | {"num_key_value_heads": 28}, *advice) is None


def test_a_length_that_no_number_of_gpus_holds_is_told_as_such(tmp_path):
    longest = ["rollout.kv_capacity=null", "rollout.max_len=20000000", "packer.max_tokens=20000000"]
    line = engine_fault(tmp_path, {}, *longest)
    assert line.startswith("rollout.max_len=20000000: a GPU of the engine has room for ")
    assert line.endswith(
        "on any number of GPUs that the model's heads divide over; lower it, or serve a smaller model"
    )
    assert engine_fault(tmp_path, {"num_hidden_layers": 100_000}).startswith("rollout.max_len=18432: a GPU")


def test_a_reference_inside_the_learner_counts_and_one_elsewhere_does_not(tmp_path):
    inside = shipped("7b_24gpu", tmp_path, "algorithm.kl_coef=0.1")
    elsewhere = shipped("7b_24gpu", tmp_path, "algorithm.kl_coef=0.1", "algorithm.reference_pass=stage")
    size = 4 * 7.6e9 / 14 + 2 * 1.09e9  # shards in fp32, and its embeddings
    assert gpu_memory(inside)[0].parts["reference model"] == pytest.approx(size, rel=0.01)
    assert "reference model" not in gpu_memory(elsewhere)[0].parts


def test_a_frozen_model_as_a_stage_has_a_column_by_its_own_shape(tmp_path):
    refers = ["algorithm.kl_coef=0.1", "algorithm.reference_pass=stage"]
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text(json.dumps({**QWEN_7B, "num_hidden_layers": 56}))
    taught = [f"algorithm.teacher={teacher}", "algorithm.teacher_coef=1.0", "rollout.without_signal=train"]
    config = shipped("7b_24gpu", tmp_path, *refers, *taught)
    _, _, reference, larger = gpu_memory(config, gpu_bytes=141e9)
    assert (reference.kind, larger.kind) == ("reference", "teacher")
    assert reference.parts["masters (fp32)"] == pytest.approx(4 * 7.6e9, rel=0.01)
    assert larger.parts["masters (fp32)"] == pytest.approx(4 * (2 * 7.6e9 - 1.09e9), rel=0.01)
    assert memory_faults(config, kinds=["reference", "teacher"]) == []
    (line,) = memory_faults(config, gpu_bytes=60e9, kinds=["reference", "teacher"])
    assert line.startswith("algorithm.teacher: a GPU of the teacher needs ")
    assert line.endswith(" has 60.0; name the address of a server, or set learner.offload=true")
    served = shipped("7b_24gpu", tmp_path, *taught, "algorithm.teacher=http://10.0.0.5:30000")
    assert [column.kind for column in gpu_memory(served)] == ["learner", "engine"]


def test_without_a_cache_size_an_engine_fills_its_share(tmp_path):
    engine = gpu_memory(shipped("7b_8gpu", tmp_path, "rollout.kv_capacity=null"))[1]
    assert engine.total == pytest.approx(80e9)


def test_a_run_on_cpus_and_a_model_that_is_not_there_have_no_table(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    laptop = load_config(REPO / "configs" / "quickstart.yaml", [f"model.path={tmp_path}"])
    absent = load_config(MATH / "7b_8gpu.yaml", ["model.path=models/Nobody-7B"])
    assert gpu_memory(laptop) == gpu_memory(absent) == []


def test_a_known_model_that_is_not_there_weighs_as_much_as_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_7B, "dtype": "bfloat16"}))
    there = load_config(MATH / "7b_8gpu.yaml", [f"model.path={tmp_path}"])
    by_name = load_config(MATH / "7b_8gpu.yaml", ["model.path=models/qwen2.5-7b"])
    assert gpu_memory(by_name) == gpu_memory(there) != []


def test_the_heads_chunk_is_that_of_the_loss():
    assert HEAD_TOKENS == logprob.FUSED_CHUNK


def test_a_token_of_a_mixture_is_multiplied_with_what_it_goes_through(tmp_path):
    _, shape = outline(tmp_path, MODELS["glm4 of experts, dense at first"])
    dense = outline(tmp_path, MODELS["llama"])[1]
    feed_forward = (
        3 * 64 * (160 + 2 * (2 + 1) * 48)
    )  # the first layer's, and in two of two experts and a shared one
    gates = 2 * 8 * 64
    assert shape.active == dense.active - 3 * 3 * 64 * 160 + feed_forward + gates


def test_a_shape_without_a_size_is_none(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 3584}')
    assert read_shape(tmp_path) is None
    assert ModelShape(vocab_size=2, hidden_size=4, num_hidden_layers=1, num_attention_heads=2).key_width == 4


def test_the_table_and_the_refusal_are_shown_also_where_there_is_no_gpu(tmp_path):
    """Here nothing has a place either, which is the last line."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    changes = ("learner.world_size=2", "learner.recompute=all")
    config = ("experiments/math_long_cot/7b_8gpu.yaml", f"model.path={tmp_path}", *changes)
    code, output, lines = doctor(*config)
    assert code == 2
    assert "masters (fp32)" in output
    assert "KV cache" in output
    assert "learner.world_size=2: a GPU of the learner needs 80.9 GB and has 80.0; set it to 3" in output
    assert len(lines) == 1
    assert "a GPU of" not in doctor(*config, "--gpu-gb", "141")[1]


def test_a_critic_counts_as_the_states_of_its_parameters_without_gradients(tmp_path):
    plain, valued = (shipped("7b_24gpu", tmp_path, f"algorithm.name={name}") for name in ("grpo", "ppo"))
    parts = gpu_memory(valued)[0].parts
    assert parts.keys() - gpu_memory(plain)[0].parts.keys() == {"critic"}
    assert parts["critic"] == sum(critic_parts(read_shape(valued.model.path), valued.learner).values())
    for tied in (False, True):
        folder = make_model_folder(tmp_path / f"tied-{tied}", tied=tied)
        learner = make_learner(folder, algorithm=AlgorithmConfig(name="ppo"))
        counted = 12 * sum(one.numel() for one in learner._critic.model.parameters())
        shape = read_shape(folder)
        found = critic_parts(shape, LearnerConfig())["critic"]
        assert counted - 12 * shape.hidden_size == found, "the head is a row"
