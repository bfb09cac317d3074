"""What an evaluation begins with, and which one `--resume` goes on with."""

from asyncio import to_thread
from io import StringIO
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import RunFolder, new_run
from laminar_py.records.events import RunEnded
from laminar_py.runtime.orchestrator.launch import evaluate
from laminar_py.runtime.orchestrator.sources import (
    EvalRequest,
    EvalSource,
    begin_evaluation,
    find_open,
    settings_of,
)
from tests.learner.builders import full_parameters
from tests.ledger import runs as ledgers
from tests.orchestrator.test_exports import make_run, rotate_while_read


def begun(source: Path, *overrides: str) -> RunFolder:
    """An evaluation that was killed once it had begun."""
    settings = settings_of(EvalRequest(source=source, overrides=overrides))
    evaluation = new_run(settings)
    begin_evaluation(evaluation, settings, source)
    return evaluation


def resume(source: Path, *overrides: str) -> None:
    request = EvalRequest(source=source, overrides=overrides, resume=True)
    evaluate(request, console=Console(file=StringIO()))


def gone_on_with(source: Path) -> RunFolder:
    return find_open(settings_of(EvalRequest(source=source)), source)


def test_what_is_evaluated_of_a_run_that_goes_on_is_the_checkpoint_that_was_read(tmp_path, monkeypatch):
    run = tmp_path / "run"
    learner = make_run(run, f"runs={tmp_path / 'runs'}")
    rotate_while_read(run, monkeypatch)
    evaluation = begun(run)
    source = msgspec.json.decode((evaluation.path / "source.json").read_bytes(), type=EvalSource)
    assert source == EvalSource(path=str(run / "checkpoints/step-2"), step=2)
    config = load_config(evaluation.config, [])
    assert config.model.path == evaluation.path / "model"
    model, trained = AutoModelForCausalLM.from_pretrained(config.model.path), full_parameters(learner)
    assert all(torch.equal(values, trained[name]) for name, values in model.named_parameters())


def test_evaluations_of_one_checkpoint_share_nothing(tmp_path):
    run = tmp_path / "run"
    make_run(run, f"runs={tmp_path / 'runs'}")
    first, second = begun(run), begun(run)
    assert [one.path.name for one in (first, second)] == ["eval-quickstart-1", "eval-quickstart-2"]
    for one in (first, second):
        assert load_config(one.config, []).model.path.parent == one.path
        assert (one.path / "model/model.safetensors").is_file()
    assert not [path for path in (tmp_path / "runs").iterdir() if path not in (first.path, second.path)]


def test_each_of_two_evaluations_can_be_gone_on_with(tmp_path):
    run = tmp_path / "run"
    make_run(run, f"runs={tmp_path / 'runs'}")
    older, newer = begun(run / "checkpoints/step-1"), begun(run / "checkpoints/step-2")
    assert gone_on_with(run / "checkpoints/step-1").path == older.path
    assert gone_on_with(run / "checkpoints/step-2").path == newer.path
    assert gone_on_with(run).path == newer.path
    newer.lock()
    assert gone_on_with(run).path == older.path, "the newer one is under way"
    newer.unlock()


def test_an_evaluation_of_another_release_does_not_keep_newer_ones_from_going_on(tmp_path):
    run = tmp_path / "run"
    make_run(run, f"runs={tmp_path / 'runs'}")
    newer, older = begun(run), begun(run)
    older.config.write_text("of: another release\n")
    assert gone_on_with(run).path == newer.path


def test_weights_that_a_killed_evaluation_left_half_written_are_cleared_away_by_the_next(tmp_path, monkeypatch):
    run = tmp_path / "run"
    make_run(run, f"runs={tmp_path / 'runs'}")
    request = EvalRequest(source=run)
    kept, left, led = begun(run), new_run(settings_of(request)), new_run(settings_of(request))
    for one in (left, led):
        (one.path / "model").mkdir()
    led.lock()

    def refuse(*_):
        raise ConfigError("no")

    monkeypatch.setattr("laminar_py.runtime.orchestrator.launch.begin_evaluation", refuse)
    with pytest.raises(ConfigError, match="no"):
        evaluate(request, console=Console(file=StringIO()))
    assert sorted((tmp_path / "runs").glob("eval-*")) == sorted([kept.path, led.path])
    led.unlock()


def test_a_resume_that_asks_for_other_settings_is_refused_in_one_line(tmp_path):
    run = tmp_path / "run"
    make_run(run, f"runs={tmp_path / 'runs'}", steps=1)
    told = "eval.sets.heldout.samples=4", "eval.sets.heldout.temperature=0.5"
    evaluation = begun(run, *told)
    kept = sorted(evaluation.path.iterdir())
    for source, settings in (
        (run, ("eval.sets.heldout.samples=8", told[1])),
        (run, (*told, "seed=9")),
        (run / "checkpoints/step-7", told),
    ):
        with pytest.raises(
            ConfigError, match=r"^source=.*: .*/runs has no unfinished eval-quickstart-<n> of this source"
        ):
            resume(source, *settings)
    assert sorted(evaluation.path.iterdir()) == kept


async def test_a_finished_evaluation_does_not_resume(tmp_path):
    run = tmp_path / "run"
    await to_thread(make_run, run, f"runs={tmp_path / 'runs'}", steps=1)
    evaluation = begun(run)
    async with ledgers.open_ledger(evaluation.path) as ledger:
        ledgers.begin(ledger)
        ledger.append(RunEnded(1, "finished"))
    with pytest.raises(ConfigError, match=r"has no unfinished eval-quickstart-<n>"):
        resume(run)
