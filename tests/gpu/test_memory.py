"""The learner's memory by doctor's formula, against the peak that CUDA's allocator counted in a step."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from laminar_lab.doctor.memory import learner_parts
from laminar_lab.model_shape import read_shape
from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.data import ModelConfig
from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.learner.step import Learner
from tests.builders import make_config
from tests.learner.builders import Sample, pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TOKENS = 8192
SIZES = {  # 0.5 billion parameters
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
HOW = {
    "all kept": {"recompute": "none"},
    "some again": {"recompute": "selective"},
    "all again": {"recompute": "all"},
    "inputs of layers on the host": {"recompute": "all_offloaded"},
    "offloaded": {"recompute": "all", "offload": True},
    "offloaded, gradients whole": {"recompute": "all", "offload": True, "accumulate": "whole"},
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    path = tmp_path_factory.mktemp("group") / "rendezvous"
    yield join_group(str(path), rank=0, world_size=1, device_type="cuda")
    leave_group()


def long_batch(vocab: int):
    generator = np.random.default_rng(0)
    ids = generator.integers(0, vocab, TOKENS)
    return pack([Sample(ids, 1024, generator.normal(-9.0, 0.3, TOKENS - 1024), 1.0)], num_total=1)


@pytest.mark.parametrize("how", HOW)
def test_a_steps_peak_is_near_the_formula(how: str, mesh: DeviceMesh, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    (tmp_path / "tokenizer.json").write_text("{}")
    placed = {"cluster": {"learner_device": "cuda"}, "packer": {"max_tokens": TOKENS}, "learner": HOW[how]}
    config = make_config(model={"path": str(tmp_path)}, **placed)
    gc.collect()  # a model refers to itself, so that of the test before would count
    drawn = ModelConfig(path=tmp_path, from_scratch=True)
    learner = Learner(drawn, config.learner, AlgorithmConfig(), temperature=1.0, seed=0, mesh=mesh)
    batch = long_batch(SIZES["vocab_size"])
    learner.step([batch])  # makes the moments
    torch.cuda.reset_peak_memory_stats()
    learner.step([batch, batch])
    shape = read_shape(tmp_path)
    assert shape is not None
    expected = sum(learner_parts(shape, config).values())
    assert torch.cuda.max_memory_allocated() == pytest.approx(expected, rel=0.2)
