"""A checkpoint that differs from its learner is named, with the tensor, and a sound one never is (law 13)."""

from pathlib import Path
from threading import Timer

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader

from laminar_py.config.learner import LoraConfig
from laminar_py.learner import checkpoint, readback
from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.learner.marker import complete_checkpoint
from laminar_py.learner.readback import SAMPLES, sample_learner
from laminar_py.runtime.workers.learner import _first_fault
from tests.learner.builders import (
    SETTINGS,
    make_learner,
    make_mixture_folder,
    make_model_folder,
    make_sequences,
    pack,
)
from tests.learner.ranks import run_ranks
from tests.learner.test_sharded import WORLD_SIZE, microbatches

WEIGHT = "model.layers.1.mlp.down_proj.weight"
ADAPTED = SETTINGS.model_copy(update={"lora": LoraConfig(rank=4, alpha=8.0)})


def batch(seed: int):
    return [pack(make_sequences(seed=seed), num_total=6)]


def copied(state):
    """A state dict in memory of its own."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    return {key: copied(value) for key, value in state.items()} if isinstance(state, dict) else state


def tamper(monkeypatch, change):
    """`change(first, staged)` returns what the stager returns; `first` is the first checkpoint's state."""
    stager, seen = checkpoint.StateDictStager, []
    stage = stager.stage

    def planted(self, state, **kwargs):
        staged = stage(self, state, **kwargs)
        seen.append(copied(staged))
        return change(seen[0], staged)

    monkeypatch.setattr(stager, "stage", planted)


def stale(*keys):
    """A change that puts the first checkpoint's value at a path of the state."""

    def change(first, staged):
        old, new = first, staged
        for key in keys[:-1]:
            old, new = old[key], new[key]
        new[keys[-1]] = old[keys[-1]]
        return staged

    return change


def saved_twice(model_folder: Path, folder: Path) -> tuple[str, str]:
    """Faults of a checkpoint, and of another one two steps later."""
    learner = make_learner(model_folder)
    learner.step(batch(0))
    first = learner.save(folder / "step-1")
    learner.step(batch(1))
    learner.step(batch(2))
    return first, learner.save(folder / "step-3")


def test_the_first_checkpoint_written_again_is_named(model_folder: Path, tmp_path: Path, monkeypatch):
    tamper(monkeypatch, lambda first, staged: first)
    first, later = saved_twice(model_folder, tmp_path)
    assert first == ""
    assert later.startswith(
        "checkpoint step-3: model.embed_tokens.weight on disk differs from the learner's, and so"
    )


def test_moments_of_another_step_are_named(model_folder: Path, tmp_path: Path, monkeypatch):
    tamper(monkeypatch, stale("optimizer"))
    first, later = saved_twice(model_folder, tmp_path)
    assert first == ""
    assert "step-3: optimizer.state.model.embed_tokens.weight.step on disk differs" in later


def test_one_stale_tensor_is_named(model_folder: Path, tmp_path: Path, monkeypatch):
    tamper(monkeypatch, stale("model", WEIGHT))
    assert saved_twice(model_folder, tmp_path) == (
        "",
        f"checkpoint step-3: {WEIGHT} on disk differs from the learner's",
    )


@pytest.mark.parametrize("moment", ["step", "exp_avg", "exp_avg_sq"])
def test_one_stale_part_of_the_optimizer_is_named(model_folder: Path, tmp_path: Path, monkeypatch, moment):
    tamper(monkeypatch, stale("optimizer", "state", WEIGHT, moment))
    assert saved_twice(model_folder, tmp_path) == (
        "",
        f"checkpoint step-3: optimizer.state.{WEIGHT}.{moment} on disk differs from the learner's",
    )


def test_a_marker_of_another_step_is_named(model_folder: Path, tmp_path: Path, monkeypatch):
    def late(partial, folder, *, step, **kwargs):
        complete_checkpoint(partial, folder, step=step - 1, **kwargs)

    monkeypatch.setattr(checkpoint, "complete_checkpoint", late)
    _, later = saved_twice(model_folder, tmp_path)
    assert later == (
        "checkpoint step-3: has step 2 and 3 updates on disk, and the learner was at step 3 and 3 updates"
    )


def test_an_optimizer_that_forgot_its_updates_is_named(model_folder: Path, tmp_path: Path):
    learner = make_learner(model_folder)
    learner.step(batch(0))
    for values in learner._optimizer.adamw.state.values():
        values["step"].zero_()
    learner.step(batch(1))
    assert learner.save(tmp_path / "step-2") == (
        "checkpoint step-2: AdamW has counted 1 updates, and the learner has made 2"
    )


def test_files_that_are_gone_are_a_fault_and_no_error(model_folder: Path, tmp_path: Path, monkeypatch):
    def lossy(partial, folder, **kwargs):
        complete_checkpoint(partial, folder, **kwargs)
        (folder / ".metadata").unlink()

    monkeypatch.setattr(checkpoint, "complete_checkpoint", lossy)
    fault, _ = saved_twice(model_folder, tmp_path)
    assert fault.startswith("checkpoint step-1: cannot be read back: ConfigError(")


def test_a_checkpoint_that_another_host_completes_late_is_waited_for(model_folder, tmp_path, monkeypatch):
    def late(partial, folder, **kwargs):
        Timer(0.2, complete_checkpoint, (partial, folder), kwargs).start()

    monkeypatch.setattr(checkpoint, "complete_checkpoint", late)
    assert not make_learner(model_folder).save(tmp_path / "step-0")
    monkeypatch.setattr(readback, "VISIBLE_S", 0.0)
    assert "cannot be read back" in make_learner(model_folder).save(tmp_path / "step-1")


def test_a_load_that_restores_nothing_is_named(model_folder: Path, tmp_path: Path, monkeypatch):
    saved_twice(model_folder, tmp_path)
    monkeypatch.setattr(state_dict_loader, "load", lambda *args, **kwargs: None)
    fault = make_learner(model_folder).load(tmp_path / "step-3")
    assert fault.startswith("checkpoint step-3: model.embed_tokens.weight on disk differs from the learner's, and")


def test_a_load_that_leaves_the_optimizer_is_named(model_folder: Path, tmp_path: Path, monkeypatch):
    saved_twice(model_folder, tmp_path)
    load = state_dict_loader.load
    monkeypatch.setattr(
        state_dict_loader, "load", lambda state, **kwargs: load({"model": state["model"]}, **kwargs)
    )
    fault = make_learner(model_folder).load(tmp_path / "step-3")
    assert "step-3: optimizer.state.model.embed_tokens.weight.step on disk differs" in fault


def test_an_update_while_the_files_are_written_is_no_fault(model_folder: Path, tmp_path: Path):
    learner = make_learner(model_folder)
    for step in range(3):
        learner.begin_save(tmp_path / f"step-{step}")
        learner.step(batch(step))
        assert learner.finish_save() == ""


@pytest.mark.parametrize("kind", ["plain", "tied", "mixture", "adapters"])
def test_sound_checkpoints_have_no_fault(tmp_path: Path, kind: str):
    make = make_mixture_folder if kind == "mixture" else make_model_folder
    folder = make_model_folder(tmp_path / "model", tied=True) if kind == "tied" else make(tmp_path / "model")
    settings = ADAPTED if kind == "adapters" else SETTINGS
    learner = make_learner(folder, settings=settings)
    assert learner.save(tmp_path / "step-0") == ""
    for step in range(2):
        learner.step(batch(step))
    assert learner.save(tmp_path / "step-2") == ""
    for number in (0, 2):
        resumed = make_learner(folder, settings=settings)
        assert resumed.load(tmp_path / f"step-{number}") == ""
        resumed.step(batch(number))
        assert resumed.save(tmp_path / f"again-{number}") == ""


def test_a_skipped_update_is_no_fault(model_folder: Path, tmp_path: Path):
    learner = make_learner(model_folder)
    learner.step(batch(0))
    next(learner.model.parameters()).data[:, 0] = torch.nan
    assert learner.step(batch(1)).skipped == 1
    assert learner.save(tmp_path / "step-2") == ""
    assert make_learner(model_folder).load(tmp_path / "step-2") == ""


def test_a_checkpoint_samples_few_values_of_each_tensor_at_places_of_its_own(model_folder: Path):
    learner = make_learner(model_folder)
    learner.step(batch(0))
    one, other = (sample_learner(learner.model, learner._optimizer.adamw, seed=seed) for seed in ("1", "2"))
    assert {len(sample.places) for sample in one} == {SAMPLES, 1}  # 1 of the counters
    assert len(one) == 4 * len(list(learner.model.parameters()))
    assert any((a.places != b.places).any() for a, b in zip(one, other, strict=True))


def ranks_main(rank: int, model_folder: Path, folder: Path, offload: bool, planted: bool) -> None:
    """Two ranks save, step on, and load; `planted`: rank 1 writes an old tensor into the second checkpoint."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=WORLD_SIZE)
    settings = SETTINGS.model_copy(update={"offload": offload})
    learner = make_learner(model_folder, mesh=mesh, settings=settings)
    with pytest.MonkeyPatch.context() as patch:
        if planted and rank == 1:
            tamper(patch, stale("model", WEIGHT))
        assert learner.save(folder / "step-0") == ""
        learner.step(microbatches(rank, WORLD_SIZE))
        learner.begin_save(folder / "step-1")
        learner.step(microbatches(rank, WORLD_SIZE))
        fault = learner.finish_save()
    assert (WEIGHT in fault) is (planted and rank == 1), fault
    assert planted or not fault, fault
    resumed = make_learner(model_folder, mesh=mesh, settings=settings)
    assert resumed.load(folder / "step-1") == ""
    leave_group()


@pytest.mark.slow
@pytest.mark.parametrize(("offload", "planted"), [(False, False), (True, False), (False, True)])
def test_each_of_two_ranks_reads_its_own_shards_back(model_folder: Path, tmp_path: Path, offload, planted):
    run_ranks(ranks_main, model_folder, tmp_path, offload, planted, world_size=WORLD_SIZE)
    assert make_learner(model_folder).load(tmp_path / "step-1") == ""  # of one rank


def test_the_faults_of_all_ranks_are_one_text():
    assert _first_fault(["", None]) == ""
    assert _first_fault(["x differs"]) == "x differs"
    assert _first_fault(["", "x differs", "y differs"]) == "x differs (rank 1; 2 of 3 ranks found a fault)"


def test_a_checkpoint_of_an_older_version_loads_without_a_fault(model_folder: Path, tmp_path: Path, monkeypatch):
    def old(partial, folder, *, updates, **kwargs):
        complete_checkpoint(partial, folder, **kwargs)

    monkeypatch.setattr(checkpoint, "complete_checkpoint", old)
    learner = make_learner(model_folder)
    learner.step(batch(0))
    learner.save(tmp_path / "step-1")
    resumed = make_learner(model_folder)
    assert resumed.load(tmp_path / "step-1") == ""
    assert resumed._optimizer.updates == 1
