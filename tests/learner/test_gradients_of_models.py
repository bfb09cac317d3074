"""Law 5 for each kind of model, at one rank and at two, with and without accumulation; fp32."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.learner.step import Learner
from laminar_py.records.trajectory import MicroBatch
from tests.learner.builders import (
    SETTINGS,
    Sample,
    assert_near,
    make_learner,
    make_llama_folder,
    make_mixture_folder,
    make_model_folder,
    make_sequences,
    pack,
    record_gradients,
    with_experts,
)
from tests.learner.ranks import run_ranks
from tests.learner.test_sharded import WORLD_SIZE

REL = 1e-5
NOT_CLIPPED = SETTINGS.model_copy(update={"grad_clip": 1e9})
MODELS = {"qwen3": make_model_folder, "llama": make_llama_folder, "mixture": make_mixture_folder}
REPLAYED = "mixture, replayed"
KINDS = [*MODELS, REPLAYED]
ACCUMULATIONS = [1, 4]  # microbatches of a rank
# Of two tokens the one that is trained attends to itself alone, and gradients of queries are 0 but for rounding.
LENGTHS = st.lists(st.integers(2, 70), min_size=4, max_size=10).filter(lambda lengths: max(lengths) >= 10)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: make(root / name) for name, make in MODELS.items()}
    return made | {REPLAYED: made["mixture"]}


def draw(kind: str, lengths: list[int], *, seed: int) -> list[Sample]:
    """With advantages above 0, so that the loss is no small difference of large terms."""
    sequences = [replace(s, advantage=abs(s.advantage)) for s in make_sequences(tuple(lengths), seed=seed)]
    return with_experts(sequences, seed=seed) if kind == REPLAYED else sequences


def packed(sequences: list[Sample], *, count: int) -> list[MicroBatch]:
    """In so many rows."""
    return [pack(sequences[place::count], num_total=len(sequences)) for place in range(count)]


def step_gradients(learner: Learner, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """Of one step, which must be the learner's first; its loss among them."""
    updates = record_gradients(learner)
    loss = learner.step(batches).loss
    return updates[0] | {"loss": torch.tensor([loss])}


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None, derandomize=True)  # a near tie of experts may go either way
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_loss_and_gradients_of_any_lengths_are_those_one_by_one(folders, kind, accumulation, lengths, seed):
    sequences = draw(kind, lengths, seed=seed)
    alone, together = (make_learner(folders[kind], settings=NOT_CLIPPED) for _ in range(2))
    expected = step_gradients(alone, packed(sequences, count=len(sequences)))
    assert_near(step_gradients(together, packed(sequences, count=accumulation)), expected, rel=REL)


CASES = [(kind, accumulation) for kind in KINDS for accumulation in ACCUMULATIONS]


def case_sequences(kind: str, accumulation: int) -> list[Sample]:
    """Enough for all microbatches of all ranks; lengths differ from case to case."""
    seed = CASES.index((kind, accumulation))
    return draw(kind, np.random.default_rng(seed).integers(2, 70, 12).tolist(), seed=seed)


def rank_main(rank: int, folders: dict[str, Path], folder: Path) -> None:
    """The first step of every case."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=WORLD_SIZE)
    for kind, accumulation in CASES:
        batches = packed(case_sequences(kind, accumulation), count=WORLD_SIZE * accumulation)[rank::WORLD_SIZE]
        learner = make_learner(folders[kind], mesh=mesh, settings=NOT_CLIPPED)
        save_file(step_gradients(learner, batches), folder / f"{kind}-{accumulation}-{rank}.safetensors")
    leave_group()


@pytest.fixture(scope="module")
def two_ranks(folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each of two ranks has found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(rank_main, folders, folder, world_size=WORLD_SIZE)
    return folder


@pytest.mark.parametrize(("kind", "accumulation"), CASES)
def test_loss_and_gradients_of_two_ranks_are_those_one_by_one(folders, two_ranks, kind: str, accumulation: int):
    sequences = case_sequences(kind, accumulation)
    learner = make_learner(folders[kind], settings=NOT_CLIPPED)
    expected = step_gradients(learner, packed(sequences, count=len(sequences)))
    for rank in range(WORLD_SIZE):
        found = load_file(two_ranks / f"{kind}-{accumulation}-{rank}.safetensors")
        assert_near(found, expected, rel=REL)
