"""The learner on a GPU: bf16 layers near what fp32 on a CPU computes, whatever saves memory or time.

The limits are those of bf16, whose steps are 2^-8 of a number.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from laminar_py.config.learner import LearnerConfig, Recompute
from laminar_py.learner.attention import Segments, sdpa_per_sequence, torch_varlen
from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.learner.model import policy_logprobs
from tests.learner.builders import SETTINGS, full_parameters, make_learner, make_model_folder, make_sequences, pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MEANS = {
    "plain": {},
    "all activations again": {"recompute": Recompute.ALL},
    "inputs of layers on the host": {"recompute": Recompute.ALL_OFFLOADED},
    "compiled, inputs on the host": {"compile": True, "recompute": Recompute.ALL_OFFLOADED},
    "some activations again": {"recompute": Recompute.SELECTIVE},
    "compiled": {"compile": True},
    "compiled, some activations again": {"compile": True, "recompute": Recompute.SELECTIVE},
    "offloaded": {"offload": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    path = tmp_path_factory.mktemp("group") / "rendezvous"
    yield join_group(str(path), rank=0, world_size=1, device_type="cuda")
    leave_group()


def settings_of(means: str) -> LearnerConfig:
    return SETTINGS.model_copy(update=MEANS[means])


def test_the_varlen_kernel_is_causal_and_keeps_sequences_apart():
    lengths = (5, 64, 1, 130)
    segments = Segments.of(lengths, device=torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, 64, device="cuda", generator=generator).bfloat16() for heads in (4, 2, 2)
    )
    found = torch_varlen(q, k, v, segments, None)
    expected = sdpa_per_sequence(q.float(), k.float(), v.float(), segments, None)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("means", MEANS)
def test_log_probabilities_and_gradients_are_those_of_the_cpu(folder: Path, mesh: DeviceMesh, means: str):
    batch = pack(make_sequences(), num_total=6)
    on_cpu, on_gpu = make_learner(folder), make_learner(folder, mesh=mesh, settings=settings_of(means))
    expected = policy_logprobs(on_cpu.model, batch)[0].detach()
    found = policy_logprobs(on_gpu.model, batch)[0].detach().cpu()
    assert (found - expected).abs().max() < 0.1
    assert (found - expected).abs().mean() < 0.02
    one, other = on_cpu.step([batch]), on_gpu.step([batch])
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=0.05)
    assert other.tokens.entropy == pytest.approx(one.tokens.entropy, rel=0.02)


@pytest.mark.parametrize("means", ["plain", "offloaded"])
def test_a_checkpoint_from_a_gpu_continues_where_it_was(folder: Path, mesh: DeviceMesh, tmp_path: Path, means):
    batch = pack(make_sequences(), num_total=6)
    first = make_learner(folder, mesh=mesh, settings=settings_of(means))
    first.save(tmp_path / "checkpoint")
    first.step([batch])
    first.save(tmp_path / "checkpoint")
    resumed = make_learner(folder, mesh=mesh, settings=settings_of(means))
    resumed.load(tmp_path / "checkpoint")
    expected = full_parameters(first)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in full_parameters(resumed).items())
    assert resumed.steps_taken == 1
