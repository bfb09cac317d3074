"""Two ranks over gloo do what one process does. Real processes."""

from pathlib import Path

import psutil
import pytest
import torch
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file, save_file

from laminar_py.learner.distributed import join_group, leave_group
from tests.learner.builders import SETTINGS, full_parameters, make_learner, make_sequences, pack

SEQUENCES = make_sequences((5, 17, 3, 40, 9, 2, 11, 30))
WORLD_SIZE = 2
JOIN_S = 90


def microbatches(rank: int, world_size: int):
    """Every rank the same number: two of the four pairs each, or all four."""
    pairs = [SEQUENCES[start : start + 2] for start in (0, 2, 4, 6)]
    return [pack(pair, num_total=8) for pair in pairs[rank::world_size]]


def measured(metrics) -> torch.Tensor:
    """[steps, 3]. AdamW can hide a wrong factor on the gradients; their norm shows it."""
    return torch.tensor([(m.loss, m.grad_norm, m.tokens.entropy) for m in metrics])


def rank_main(rank: int, model_folder: Path, folder: Path) -> None:
    """Two steps, a checkpoint, a third step and the same third step from the checkpoint."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=WORLD_SIZE)
    settings = SETTINGS.model_copy(update={"recompute": True})  # changes nothing but memory
    learner = make_learner(model_folder, mesh=mesh, settings=settings)
    metrics = [learner.step(microbatches(rank, WORLD_SIZE)) for _ in range(2)]
    learner.export_hf(folder / "out")
    learner.save(folder / "checkpoint")
    learner.step(microbatches(rank, WORLD_SIZE))
    third = full_parameters(learner)
    resumed = make_learner(model_folder, mesh=mesh)
    resumed.load(folder / "checkpoint")
    resumed.step(microbatches(rank, WORLD_SIZE))
    assert all(torch.equal(tensor, third[name]) for name, tensor in full_parameters(resumed).items())
    assert resumed.num_steps == 3
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert set(listening) <= {"127.0.0.1", "::1"}, listening
    save_file({"measured": measured(metrics)}, folder / f"metrics-{rank}.safetensors")
    leave_group()


@pytest.fixture(scope="module")
def two_ranks(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks have run."""
    folder = tmp_path_factory.mktemp("sharded")
    context = multiprocessing.spawn(rank_main, (model_folder, folder), nprocs=WORLD_SIZE, join=False)
    # `join` returns when any rank ends, and raises what a rank raised.
    done = any(context.join(timeout=JOIN_S) for _ in range(WORLD_SIZE))
    for process in context.processes:
        process.terminate()
    assert done, "a rank hangs"
    return folder


def test_two_ranks_reach_the_parameters_of_one_process(model_folder: Path, two_ranks: Path):
    learner = make_learner(model_folder)
    metrics = [learner.step(microbatches(0, 1)) for _ in range(2)]
    exported = load_file(two_ranks / "out" / "model.safetensors")
    for name, tensor in full_parameters(learner).items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-4, atol=1e-5)
    for rank in range(WORLD_SIZE):
        sharded = load_file(two_ranks / f"metrics-{rank}.safetensors")["measured"]
        torch.testing.assert_close(sharded, measured(metrics), rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_two_ranks_loads_in_one_process(model_folder: Path, two_ranks: Path):
    learner = make_learner(model_folder)
    learner.load(two_ranks / "checkpoint")
    exported = load_file(two_ranks / "out" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in full_parameters(learner).items())
    assert learner.num_steps == 2
