"""Two and four ranks over gloo do what one process does, and take up each other's checkpoints. Real processes."""

import math
from pathlib import Path

import psutil
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from laminar_py.config.algorithm import AlgorithmConfig, Objective
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import Recompute
from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.learner.packing.balance import fit_bins
from laminar_py.learner.packing.packer import Packed, deal_to_ranks, step_weights
from laminar_py.learner.sharding import shard
from tests.builders import make_trajectory
from tests.learner.builders import (
    SETTINGS,
    assert_near,
    full_parameters,
    make_learner,
    make_model_folder,
    make_sequences,
    pack,
    record_gradients,
)
from tests.learner.ranks import run_ranks

SEQUENCES = make_sequences((5, 17, 3, 40, 9, 2, 11, 30))
WORLD_SIZE = 2


def microbatches(rank: int, world_size: int):
    """Every rank the same number: two of the four pairs each, or all four."""
    pairs = [SEQUENCES[start : start + 2] for start in (0, 2, 4, 6)]
    return [pack(pair, num_total=8) for pair in pairs[rank::world_size]]


def measured(metrics) -> torch.Tensor:
    """[steps, figures]. AdamW can hide a wrong factor on the gradients; their norm shows it."""
    rows = [
        (m.loss, m.grad_norm, m.tokens.entropy, m.tokens.ratio_max, m.tokens.advantage_max, *work_of(m))
        for m in metrics
    ]
    return torch.tensor(rows)


def work_of(metrics) -> tuple[float, float]:
    return metrics.work.num_tokens, metrics.work.flops


def rank_main(rank: int, model_folder: Path, folder: Path) -> None:
    """Two steps, a checkpoint, a third step and the same third step from the checkpoint."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=WORLD_SIZE)
    settings = SETTINGS.model_copy(update={"recompute": Recompute.ALL_OFFLOADED})  # changes nothing but memory
    learner = make_learner(model_folder, mesh=mesh, settings=settings)
    metrics = [learner.step(microbatches(rank, WORLD_SIZE)) for _ in range(2)]
    weights = dict(learner.named_tensors(dtype=torch.float32))
    if rank == 0:
        save_file(weights, folder / "out.safetensors")
    learner.begin_save(folder / "checkpoint")
    learner.step(microbatches(rank, WORLD_SIZE))  # beside the writing, whose collectives are its own
    learner.finish_save()
    third = full_parameters(learner)
    resumed = make_learner(model_folder, mesh=mesh, settings=SETTINGS.model_copy(update={"offload": True}))
    resumed.load(folder / "checkpoint")
    resumed.step(microbatches(rank, WORLD_SIZE))
    assert all(torch.equal(tensor, third[name]) for name, tensor in full_parameters(resumed).items())
    assert resumed.steps_taken == 3
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert set(listening) <= {"127.0.0.1", "::1"}, listening
    save_file({"measured": measured(metrics)}, folder / f"metrics-{rank}.safetensors")
    leave_group()


@pytest.fixture(scope="module")
def two_ranks(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks have run."""
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(rank_main, model_folder, folder, world_size=WORLD_SIZE)
    return folder


def test_two_ranks_reach_the_parameters_of_one_process(model_folder: Path, two_ranks: Path):
    learner = make_learner(model_folder)
    metrics = [learner.step(microbatches(0, 1)) for _ in range(2)]
    exported = load_file(two_ranks / "out.safetensors")
    for name, tensor in full_parameters(learner).items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-4, atol=1e-5)
    for rank in range(WORLD_SIZE):
        sharded = load_file(two_ranks / f"metrics-{rank}.safetensors")["measured"]
        torch.testing.assert_close(sharded, measured(metrics), rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_two_ranks_loads_in_one_process(model_folder: Path, two_ranks: Path):
    learner = make_learner(model_folder)
    learner.load(two_ranks / "checkpoint")
    exported = load_file(two_ranks / "out.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in full_parameters(learner).items())
    assert learner.steps_taken == 2


def go_on_main(rank: int, world_size: int, model_folder: Path, checkpoint: Path, folder: Path) -> None:
    """A step from a checkpoint of another world size, and a checkpoint of that."""
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=world_size)
    learner = make_learner(model_folder, mesh=mesh)
    learner.load(checkpoint)
    loaded = full_parameters(learner)
    metrics = learner.step(microbatches(rank, world_size))
    learner.save(folder / "checkpoint")
    stepped = full_parameters(learner)
    if rank == 0:
        save_file(loaded, folder / "loaded.safetensors")
        save_file(stepped | {"measured": measured([metrics])}, folder / "stepped.safetensors")
    leave_group()


def test_a_run_goes_on_with_twice_or_half_as_many_ranks(model_folder: Path, two_ranks: Path, tmp_path: Path):
    """2 -> 4 -> 2 ranks, against one process that goes on from the same checkpoints."""
    checkpoint = two_ranks / "checkpoint"
    for world_size in (4, 2):
        folder = tmp_path / f"on-{world_size}"
        run_ranks(go_on_main, world_size, model_folder, checkpoint, folder, world_size=world_size)
        alone = make_learner(model_folder)
        alone.load(checkpoint)
        loaded = load_file(folder / "loaded.safetensors")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in full_parameters(alone).items())
        metrics = alone.step(microbatches(0, 1))
        stepped = load_file(folder / "stepped.safetensors")
        torch.testing.assert_close(stepped.pop("measured"), measured([metrics]), rtol=1e-5, atol=1e-6)
        for name, tensor in full_parameters(alone).items():
            torch.testing.assert_close(stepped[name], tensor, rtol=1e-4, atol=1e-5)
        checkpoint = folder / "checkpoint"


CASES = {
    "tba": AlgorithmConfig(name="tba", beta=0.5),
    "several updates": AlgorithmConfig(name="decoupled_ppo", updates_per_step=2, kl_coef=0.1),
    "constant": AlgorithmConfig(name="dr_grpo"),
}
ITEMS = [
    make_trajectory(f"g{i % 3}.{i}", prompt=3, response=4 + 3 * i, seed=i, reward=i % 2, advantage=i - 4)
    for i in range(8)
]
LONE = ITEMS[:1]  # leaves a rank without sequences


def step_of(items, algorithm, *, ranks):
    bins = fit_bins(items, max_tokens=40)
    terms = step_weights(bins, aggregation=algorithm.aggregation, constant=30)
    return deal_to_ranks(bins, terms, max_tokens=40, ranks=ranks, attention_share=0.0)


def broken(packed):
    """The same step with an advantage that is no number."""
    spoilt = [
        [[replace(item, advantage=math.nan) for item in bundle] for bundle in bundles]
        for bundles in packed.bundles
    ]
    return Packed(spoilt, packed.weights)


def algorithms_main(rank: int, model_folder: Path, reference: Path, folder: Path) -> None:
    """Per case a step of all sequences, one of a single sequence, and one that must change nothing."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=WORLD_SIZE)
    for name, algorithm in CASES.items():
        chosen = algorithm.model_copy(update={"reference": reference})
        learner = make_learner(model_folder, mesh=mesh, algorithm=chosen)
        grads = record_gradients(learner)
        for items in (ITEMS, LONE):
            metrics = learner.step(step_of(items, chosen, ranks=WORLD_SIZE).microbatches(rank))
            assert metrics.skipped == 0, name
        before = full_parameters(learner)
        if chosen.objective is not Objective.BALANCE:  # which takes no advantages
            skipped = learner.step(broken(step_of(ITEMS, chosen, ranks=WORLD_SIZE)).microbatches(rank))
            assert skipped.skipped == skipped.updates, name
        after = full_parameters(learner)
        assert all(torch.equal(tensor, before[key]) for key, tensor in after.items())
        if rank == 0:
            save_file(after | {"loss": torch.tensor(metrics.loss)}, folder / f"{name}.safetensors")
            save_file(grads[0], folder / f"{name}-gradients.safetensors")
    leave_group()


@pytest.fixture(scope="module")
def two_ranks_of_every_kind(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("algorithms")
    reference = make_model_folder(folder / "reference", seed=1)
    run_ranks(algorithms_main, model_folder, reference, folder, world_size=WORLD_SIZE)
    return folder, reference


@pytest.mark.parametrize("name", sorted(set(CASES) - {"several updates"}))
def test_two_ranks_learn_what_one_process_does_whatever_the_algorithm(name, model_folder, two_ranks_of_every_kind):
    """With several updates each has another part of the sequences, so there two ranks only have to agree."""
    folder, reference = two_ranks_of_every_kind
    algorithm = CASES[name].model_copy(update={"reference": reference})
    learner = make_learner(model_folder, algorithm=algorithm)
    grads = record_gradients(learner)
    for items in (ITEMS, LONE):
        metrics = learner.step(step_of(items, algorithm, ranks=1).microbatches(0))
    assert_near(load_file(folder / f"{name}-gradients.safetensors"), grads[0], rel=1e-5)
    found = load_file(folder / f"{name}.safetensors")
    assert float(found.pop("loss")) == pytest.approx(metrics.loss, rel=1e-4, abs=1e-6)
    for key, tensor in full_parameters(learner).items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)


def test_a_model_without_a_list_of_layers_is_refused(tmp_path: Path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=8))
    model.name_or_path = "models/old"
    mesh = join_group(str(tmp_path / "rendezvous"), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"^model\.path=models/old: a gpt2 model has no list `layers`.*; "):
            shard(model, mesh, source=ModelConfig(path=tmp_path))
    finally:
        leave_group()
