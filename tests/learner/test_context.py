"""Ranks that share rows (context parallelism) learn what one process does. Real processes."""

import json

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.learner import LearnerConfig, LoraConfig, Recompute
from laminar_py.config.section import ConfigError
from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.records.pieces import SamplingMask
from tests.learner.builders import (
    SETTINGS,
    VOCAB,
    assert_near,
    full_parameters,
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

STEPS = 2
LENGTHS = (5, 17, 3, 40, 9, 2, 11, 30, 21, 8, 6, 13, 4, 19, 7, 10, 61, 6)
SLOW = SETTINGS.model_copy(update={"lr": 1e-4})
DECOUPLED = AlgorithmConfig(name="decoupled_ppo", updates_per_step=2)
CASES = {  # model, settings, algorithm
    "qwen3": ("qwen3", {}, AlgorithmConfig()),
    "llama": ("llama", {"recompute": Recompute.ALL_OFFLOADED}, AlgorithmConfig()),
    "mixture": ("mixture", {"recompute": Recompute.SELECTIVE}, AlgorithmConfig()),
    "masks": ("qwen3", {}, AlgorithmConfig()),
    "decoupled": ("qwen3", {}, DECOUPLED),
    "balance": ("qwen3", {}, AlgorithmConfig(name="tba")),
    "reference": ("qwen3", {}, AlgorithmConfig(kl_coef=0.1)),
    "lora": ("qwen3", {"lora": LoraConfig(rank=4, alpha=8.0)}, AlgorithmConfig()),
}
COMPILED = {"compiled": ("qwen3", {"recompute": Recompute.ALL, "compile": True}, AlgorithmConfig())}


def masked(batch):
    """Sampled among four tokens each."""
    counts = np.where(batch.loss_weights > 0, 4, 0).astype(np.int32)
    others = (batch.labels[counts > 0][:, None] + np.arange(4)) % VOCAB
    return msgspec.structs.replace(batch, support=SamplingMask(counts, np.sort(others).astype(np.int32).ravel()))


def rows(case):
    """Four rows of uneven lengths; a rank's piece of them rarely ends where a sequence does."""
    sequences = make_sequences(LENGTHS)
    if case == "mixture":
        sequences = with_experts(sequences)
    found = [pack(sequences[first::4], num_total=len(LENGTHS)) for first in range(4)]
    return [masked(row) for row in found] if case == "masks" else found


def settings_of(case, context_parallel=1, world_size=1):
    model, changes, algorithm = (CASES | COMPILED)[case]
    sizes = {"context_parallel": context_parallel, "world_size": world_size}
    return model, LearnerConfig.model_validate(SLOW.model_dump() | sizes | changes), algorithm


def run_case(case, folder, *, mesh=None, context_parallel=1, world_size=1, place=0):
    """Steps; the first gradients, the last weights and the metrics."""
    model, settings, algorithm = settings_of(case, context_parallel, world_size)
    learner = make_learner(folder / model, mesh=mesh, settings=settings, algorithm=algorithm)
    gradients = record_gradients(learner)
    each = 4 * context_parallel // world_size
    own = rows(case)[place * each : (place + 1) * each]
    metrics = [learner.step(own) for _ in range(STEPS)]
    return learner, gradients, full_parameters(learner), metrics


def measures(metrics):
    """What a step reports, but for its time."""
    return [
        {"loss": one.loss, "norm": one.grad_norm, "tokens": one.tokens.num_tokens, "entropy": one.tokens.entropy,
         "work": one.work.num_tokens, "proved": one.proof.tokens, "ids": one.proof.ids}
        for one in metrics
    ]  # fmt: skip


def rank_main(rank, world_size, context_parallel, cases, models, folder):
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=world_size)
    for case in cases:
        place = rank // context_parallel
        learner, gradients, weights, metrics = run_case(
            case, models, mesh=mesh, context_parallel=context_parallel, world_size=world_size, place=place
        )
        gaps = [abs(s.expected - s.found) / max(s.size, 1e-9) for one in metrics for s in one.proof.gradients]
        assert rank or max(gaps, default=0.0) < 1e-5
        faults = learner.save(folder / f"{case}-checkpoint")
        assert faults == ""
        if rank == 0:
            save_file(weights, folder / f"{case}.safetensors")
            for update, found in enumerate(gradients):
                save_file(found, folder / f"{case}-gradients-{update}.safetensors")
            (folder / f"{case}.json").write_text(json.dumps(measures(metrics)))
        if case == "qwen3":
            found = learner.probe([np.arange(7, dtype=np.int32), np.arange(3, dtype=np.int32)])
            if rank == 0:
                (folder / "probe.json").write_text(json.dumps([one.logprobs[:3].tolist() for one in found]))
    leave_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"), kv_heads=2)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """With four key-value heads."""
    return make_models(tmp_path_factory.mktemp("wide"), kv_heads=4)


def make_models(folder, *, kv_heads):
    make_model_folder(folder / "qwen3", kv_heads=kv_heads)
    make_llama_folder(folder / "llama", kv_heads=kv_heads)
    make_mixture_folder(folder / "mixture", kv_heads=kv_heads)
    return folder


LAYOUTS = {"2": (2, 2), "2 x 2": (4, 2), "4": (4, 4)}  # ranks, and ranks that share a row


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "2" else pytest.mark.slow) for name in LAYOUTS],
)
def layout(request, models, wide, tmp_path_factory):
    """The models, and the folder in which ranks ran all cases."""
    world_size, context_parallel = LAYOUTS[request.param]
    of_models = wide if context_parallel == 4 else models
    folder = tmp_path_factory.mktemp("layout")
    run_ranks(rank_main, world_size, context_parallel, list(CASES), of_models, folder, world_size=world_size)
    return of_models, folder


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_rows_have_the_gradients_of_one_process(layout, case):
    models, folder = layout
    learner, gradients, weights, metrics = run_case(case, models)
    for update, expected in enumerate(gradients):
        assert_near(load_file(folder / f"{case}-gradients-{update}.safetensors"), expected, rel=1e-5)
    near = 1e-3 if case == "lora" else 1e-6  # B begins at zero, where AdamW divides a gradient by its own size
    assert_near(load_file(folder / f"{case}.safetensors"), weights, rel=near)
    found = json.loads((folder / f"{case}.json").read_text())
    assert found == [pytest.approx(one, rel=1e-5) for one in measures(metrics)]
    fresh = make_learner(models / CASES[case][0], settings=settings_of(case)[1], algorithm=CASES[case][2])
    assert fresh.load(folder / f"{case}-checkpoint") == ""
    assert_near(full_parameters(fresh), weights, rel=near)
    if case == "qwen3":
        probed = learner.probe([np.arange(7, dtype=np.int32), np.arange(3, dtype=np.int32)])
        assert json.loads((folder / "probe.json").read_text()) == [
            pytest.approx(one.logprobs[:3].tolist(), rel=1e-5) for one in probed
        ]


@pytest.mark.slow
def test_ranks_compile_the_layers_of_rows_that_they_share(models, tmp_path):
    run_ranks(rank_main, 2, 2, ["compiled"], models, tmp_path, world_size=2)
    _, gradients, _, metrics = run_case("qwen3", models)
    assert_near(load_file(tmp_path / "compiled-gradients-0.safetensors"), gradients[0], rel=1e-5)
    assert json.loads((tmp_path / "compiled.json").read_text())[0]["loss"] == pytest.approx(
        metrics[0].loss, rel=1e-5
    )


def refused_main(rank, models, folder):
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=4)
    with pytest.raises(
        ConfigError, match=r"^learner\.context_parallel=4: the model has 2 key-value heads, .* 1, 2$"
    ):
        run_case("qwen3", models, mesh=mesh, context_parallel=4, world_size=4)
    leave_group()


def test_heads_that_ranks_cannot_divide_are_refused(models, tmp_path):
    run_ranks(refused_main, models, tmp_path, world_size=4)
