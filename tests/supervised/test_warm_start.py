"""The warm start learns, and its cache is hit by the same settings alone."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from laminar_contrib.supervised.cache import cached_folder
from laminar_contrib.supervised.settings import SupervisedConfig
from laminar_contrib.supervised.training import epochs, pack_examples, warm_start, warm_start_lr_factor
from laminar_lab.commands.warm import app
from laminar_lab.tiny_models import tiny_model, write_data
from laminar_py.config.data import ChatConfig, ModelConfig
from laminar_py.config.environment import EnvironmentConfig
from laminar_py.data.demonstrations import Demonstration
from tests.learner.builders import VOCAB


def example(prompt: list[int], response: list[int]) -> Demonstration:
    ids = [np.array(tokens, np.int32) for tokens in (prompt, response)]
    return Demonstration(row=0, prompt="", response="", prompt_ids=ids[0], response_ids=ids[1])


def counting(num_examples: int = 64) -> list[Demonstration]:
    """Prompt `a`, response `a+1, a+2, ...` and the id 0 at its end."""
    generator = np.random.default_rng(0)
    starts, lengths = generator.integers(1, VOCAB - 12, num_examples), generator.integers(1, 10, num_examples)
    return [
        example([start], [*range(start + 1, start + 1 + n), 0]) for start, n in zip(starts, lengths, strict=True)
    ]


def settings(folder: Path, **overrides) -> SupervisedConfig:
    data = folder / "data.jsonl"
    if not data.exists():
        data.write_text("counting\n")
    fields = {"data": str(data), "steps": 30, "tokens_per_step": 64, "lr": 1e-2, "cache": folder / "cache"}
    return SupervisedConfig(**fields | overrides)


def warm_started(model: ModelConfig, settings: SupervisedConfig, *, environment=None, seed=0, **options) -> Path:
    """The folder of a warm start on `counting`, from the cache or made now."""
    folder = cached_folder(model, settings, seed=seed, chat=ChatConfig(), environment=environment)
    if not folder.is_dir():
        warm_start(model, settings, counting(), folder=folder, seed=seed, **options)
    return folder


def test_a_pretrained_model_has_a_gentle_learning_rate(tmp_path: Path):
    rates = {"from_scratch": True}, {}, {"lr": 3e-4}
    model = tmp_path / "model"
    found = [
        settings(tmp_path, lr=given.get("lr")).peak_lr(
            ModelConfig(path=model, from_scratch="from_scratch" in given)
        )
        for given in rates
    ]
    assert found == [4e-3, 2e-5, 3e-4]


def test_the_command_writes_a_warm_folder_that_keeps_the_models_files(tmp_path: Path):
    write_data(tmp_path, tiny_model("0123456789+=", pattern=".", hidden=16, layers=1))
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "response": str(n + 1)}) + "\n" for n in range(9)))
    config, out = tmp_path / "mine.yaml", tmp_path / "warm"
    tree = {
        "name": "mine",
        "steps": 1,
        "model": {"path": str(tmp_path / "model"), "from_scratch": True},
        "data": {"train": str(data)},
        "reward": {"use": ["math"]},
        "warm_start": {"data": str(data), "steps": 3, "cache": str(tmp_path / "cache")},
    }
    config.write_text(yaml.safe_dump(tree))
    done = CliRunner().invoke(app, [str(config), str(out), "learner.lora.rank=4"])
    assert done.exit_code == 0, done.output
    assert "step 3 of 3: loss" in done.output
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "model/tokenizer.json").read_bytes()
    again = CliRunner().invoke(app, [str(config), str(out)])
    assert "exists; name a new folder" in str(again.exception)
    pretrained = [f"model.path={out}", "model.from_scratch=false", "warm_start.lr=4e-3"]
    done = CliRunner().invoke(app, [str(config), str(tmp_path / "warmer"), *pretrained])
    assert done.exit_code == 0, done.output
    before, after = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "warmer"))
    assert any((before[name] != after[name]).any() for name in before)


def test_warm_start_learns_and_exports_a_loadable_folder(model_folder: Path, tmp_path: Path):
    losses = []
    folder = warm_started(
        ModelConfig(path=model_folder),
        settings(tmp_path),
        on_step=lambda step, steps, loss: losses.append((step, loss)),
    )
    assert [step for step, _ in losses] == list(range(1, 31))
    assert losses[-1][1] < 0.5 * losses[0][1]
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == VOCAB


class WithTool(EnvironmentConfig):
    """An environment with a tool, which the chat template writes into demonstrations."""

    description: str

    @property
    def definitions(self):
        return [{"type": "function", "function": {"name": "add", "description": self.description}}]


def test_the_cache_is_hit_by_the_same_settings_alone(model_folder: Path, tmp_path: Path):
    steps = []

    model_folder = shutil.copytree(model_folder, tmp_path / "model")

    def run(seed=0, from_scratch=False, environment=None, **overrides) -> Path:
        steps.clear()
        model = ModelConfig(path=model_folder, from_scratch=from_scratch)
        config = settings(tmp_path, **{"steps": 2} | overrides)
        on_step = lambda step, *_: steps.append(step)  # noqa: E731
        return warm_started(model, config, environment=environment, seed=seed, on_step=on_step)

    first = run()
    assert len(steps) == 2
    assert run() == first
    assert not steps
    for change in ({"lr": 2e-2}, {"steps": 3}, {"tokens_per_step": 80}, {"seed": 1}, {"from_scratch": True}):
        assert run(**change) != first
        assert steps, change
    tools = [run(environment=WithTool(description=text)) for text in ("Adds.", "Adds two.")]
    assert len({first, *tools, run(environment=EnvironmentConfig())}) == 4
    (model_folder / "generation_config.json").write_text('{"eos_token_id": 3}')  # the end of a demonstration
    assert run() != first
    (tmp_path / "data.jsonl").write_text("other data\n")
    assert run() != first
    parts = tmp_path / "folder"
    parts.mkdir()
    (parts / "a.jsonl").write_text("counting\n")
    found = [run(data=str(parts)), run(data={"path": str(parts), "split": "test"})]
    (parts / "a.jsonl").rename(parts / "b.jsonl")
    assert len({first, *found, run(data=str(parts))}) == 4
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_batches_hold_every_example_once_an_epoch_and_stay_in_bounds():
    examples = counting()
    stream = epochs(examples, tokens_per_step=40, generator=random.Random(0))
    for _ in range(2):
        seen = []
        while len(seen) < len(examples):
            batch = next(stream)
            assert sum(example.num_tokens for example in batch) <= 40
            seen += [id(example) for example in batch]
        assert sorted(seen) == sorted(id(example) for example in examples)


def test_only_response_tokens_are_trained():
    row = pack_examples([example([5, 6], [7, 8]), example([3], [0])])
    assert row.labels.tolist() == [6, 7, 8, 0, 0, 0]
    np.testing.assert_allclose(row.loss_weights, [0, 1 / 3, 1 / 3, 0, 1 / 3, 0])
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1]


def test_learning_rate_warms_up_and_decays():
    factors = [warm_start_lr_factor(step, 500) for step in range(500)]
    assert factors[0] == pytest.approx(0.05)
    assert factors[19:300] == [1.0] * 281
    assert factors[400] == pytest.approx(0.5)
    assert 0.0 < factors[-1] < 0.01


def test_an_example_longer_than_a_step_is_named(model_folder: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"warm_start.tokens_per_step=4: .*raise it"):
        warm_started(ModelConfig(path=model_folder), settings(tmp_path, tokens_per_step=4))
