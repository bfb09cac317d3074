"""Recipes for GPUs: `laminar doctor` accepts each on the cluster that it names, with models of the true shape.

What a README says of memory is what the formulas say.
"""

import json
import re
from collections import Counter
from contextlib import nullcontext

import pytest

from laminar_lab.doctor import checks
from laminar_lab.doctor.checks import fit
from laminar_lab.doctor.memory import LEARNERS_TURN, REPLICAS_TURN, gpu_memory, memory_faults
from laminar_lab.model_shape import read_shape
from laminar_py.config.loading import load_config
from laminar_py.relay.tree import versions_at_peak
from laminar_py.runtime.cluster.placement import Needs, Node, make_plan
from laminar_py.runtime.preflight import node_checks
from laminar_py.runtime.preflight.inputs import version_bytes
from tests.doctor.test_memory import QWEN_7B, SMOLLM2
from tests.runs.fake_cluster import FakeCluster
from tests.runs.runs import REPO

QWEN_14B = QWEN_7B | {  # Qwen2.5-14B
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 13824,
}
QWEN_32B = QWEN_7B | {  # Qwen2.5-32B
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
}
QWEN_MIXTURE = QWEN_7B | {  # Qwen3-30B-A3B
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
}
QWEN_600M = SMOLLM2 | {  # Qwen3-0.6B
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
}
SMALL_GPU = {"smollm2_135m_1gpu", "qwen3_600m_1gpu"}  # recipes for 24 GB; the others' GPUs have 80
RECIPES = {  # config -> model, GPUs of each node
    "one_gpu/smollm2_135m_1gpu.yaml": (SMOLLM2, (1,)),
    "one_gpu/qwen3_600m_1gpu.yaml": (QWEN_600M, (1,)),
    "one_gpu/7b_lora_1gpu.yaml": (QWEN_7B, (1,)),
    "math_long_cot/7b_8gpu.yaml": (QWEN_7B, (8,)),
    "math_long_cot/14b_8gpu.yaml": (QWEN_14B, (8,)),
    "math_long_cot/7b_24gpu.yaml": (QWEN_7B, (8, 8, 8)),
    "math_long_cot/32b_64gpu.yaml": (QWEN_32B, (8,) * 8),
    "math_long_cot/32b_128k_64gpu.yaml": (QWEN_32B, (8,) * 8),
    "code_long_cot/7b_8gpu.yaml": (QWEN_7B, (8,)),
    "lora/7b_4gpu.yaml": (QWEN_7B, (4,)),
    "lora/32b_8gpu.yaml": (QWEN_32B, (8,)),
    "mixture_30b_a3b/32gpu.yaml": (QWEN_MIXTURE, (8,) * 4),
}


def gpu_bytes(name):
    """Bytes of the GPUs that a recipe is for."""
    return 24e9 if name.partition("/")[2].removesuffix(".yaml") in SMALL_GPU else 80e9


def hosts(*gpus):
    """A node for each number of GPUs."""
    return [Node(id=str(index), ip=f"10.0.0.{index}", gpus=count) for index, count in enumerate(gpus)]


def recipe(name, folder, *settings):
    """The config of a recipe, with a model of its shape in `folder`; its weights take no room."""
    (folder / "config.json").write_text(json.dumps(RECIPES[name][0]))
    (folder / "model.safetensors").touch()
    return load_config(REPO / "experiments" / name, [f"model.path={folder}", *settings])


@pytest.fixture
def sglang_python(tmp_path, monkeypatch):
    """An interpreter that answers as one with SGLang does, on hosts with compilers of its kernels."""
    headers = tmp_path / "Python.h"
    headers.touch()
    compilers = [tmp_path / "ninja", tmp_path / "cuda/bin/nvcc"]
    python = tmp_path / "python"
    compilers[-1].parent.mkdir(parents=True)
    for path in (python, *compilers):
        path.write_text(f"#!/bin/sh\ncase $2 in *nvidia*) echo '[[], \"{headers}\"]' ;; *) echo 0.5.23 ;; esac\n")
        path.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return python


def kinds_of(config):
    """Columns of the doctor's table of memory."""
    return [LEARNERS_TURN, REPLICAS_TURN] if config.cluster.share else ["learner", "engine"]


def accept(name, folder, python, *settings):
    """Have the doctor look at a recipe on the cluster that there is."""
    config = recipe(name, folder, f"runs={folder / 'runs'}", f"rollout.engine.python={python}", *settings)
    found = fit(config, gpu_bytes=gpu_bytes(name))
    assert (found.unplaced, found.faults, found.warnings) == (None, [], [])
    assert [column.kind for column in found.memory] == kinds_of(config)
    assert [node.gpus for node in found.nodes] == list(RECIPES[name][1])


@pytest.mark.parametrize("name", RECIPES)
def test_doctor_accepts_a_recipe_with_the_nodes_that_it_names(name, tmp_path, monkeypatch, sglang_python):
    """Without Ray: every node is this process."""
    seen = hosts(*RECIPES[name][1])

    async def on_node(node, function, *arguments):
        return function(*arguments)

    monkeypatch.setattr(node_checks, "on_node", on_node)
    monkeypatch.setattr(checks, "on_node", on_node)
    monkeypatch.setattr(checks, "nodes", lambda: seen)
    monkeypatch.setattr(checks, "open_cluster", lambda address: nullcontext())
    accept(name, tmp_path, sglang_python)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora/7b_4gpu.yaml", "math_long_cot/32b_64gpu.yaml"])
def test_doctor_accepts_a_recipe_on_a_cluster_of_ray(name, tmp_path, sglang_python):
    with FakeCluster(*RECIPES[name][1]) as cluster:
        accept(name, tmp_path, sglang_python, f"cluster.address={cluster.address}")


def shm_bytes(config, *gpus):
    """Shared memory of the host that needs most, bytes, once the model's true size counts."""
    nodes = hosts(*gpus)
    plan = make_plan(Needs.from_config(config), nodes)
    residents, relays = Counter(place.node for place in plan.replicas), Counter(plan.relays)
    keep = config.relay.keep_versions
    versions = (
        versions_at_peak(keep_versions=keep, num_replicas=residents[node.id], num_nodes=relays[node.id])
        for node in nodes
    )
    adapters = config.learner.lora is not None
    return max(versions) * (version_bytes(config) if adapters else 2 * read_shape(config.model.path).total)


@pytest.mark.parametrize("name", RECIPES)
def test_the_readme_of_a_recipe_has_the_figures_of_the_formulas(name, tmp_path):
    config, (_, gpus) = recipe(name, tmp_path), RECIPES[name]
    size = gpu_bytes(name)
    assert memory_faults(config, gpu_bytes=size) == []
    folder, _, file = name.partition("/")
    row = re.search(rf"^\| `{file}` \|(.+)\|$", (REPO / "experiments" / folder / "README.md").read_text(), re.M)
    cluster, learner, engines, learner_gb, engine_gb, shm_gb = map(str.strip, row[1].split("|"))
    columns = {column.kind: f"{column.total / 1e9:.0f}" for column in gpu_memory(config, gpu_bytes=size)}
    replicas, tensor_parallel = config.rollout.replicas, config.rollout.engine.tensor_parallel
    assert cluster == f"{len(gpus)} x {gpus[0]}"
    assert (learner, engines) == (str(config.learner.world_size), f"{replicas} x {tensor_parallel}")
    assert [learner_gb, engine_gb] == [columns[kind] for kind in kinds_of(config)]
    assert shm_gb == f"{shm_bytes(config, *gpus) / 1e9:.0f}"
