"""Examples of docs/data.md."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from laminar_contrib.supervised.demonstrations import read_demonstrations
from laminar_py.cli import app
from laminar_py.config.data import DataConfig
from laminar_py.config.evaluation import EvalConfig
from laminar_py.data.sources import source_at
from tests.data.templates import TEMPLATES, make_chat_encoder, make_tokenizer_folder

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_command_shows_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_tokenizer_folder(tmp_path / "model", TEMPLATES["chatml"].text)
    (tmp_path / "problems.jsonl").write_text(blocks("json")[0])
    run = {"name": "t", "steps": 1, "model": {"path": "model"}, "reward": {"use": ["math"]}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run) + blocks("yaml")[0])
    done = CliRunner().invoke(app, ["data", "run.yaml"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    shown = done.output.splitlines()
    assert all(line in shown for line in blocks("text")[0].splitlines())


def test_settings_on_the_page_are_settings() -> None:
    for block in map(yaml.safe_load, blocks("yaml")):
        DataConfig.model_validate_json(json.dumps(block["data"]))
        EvalConfig.model_validate_json(json.dumps(block.get("eval", {})))


def test_demonstrations_on_the_page_are_demonstrations(tmp_path: Path) -> None:
    encoder = make_chat_encoder(tmp_path / "model", TEMPLATES["chatml"].text)
    (tmp_path / "w.jsonl").write_text(blocks("json")[1])
    source = source_at(tmp_path / "w.jsonl", "warm_start.data")
    found = read_demonstrations(source, encoder=encoder)
    decode = encoder.tokenizer.decode
    assert [decode(one.response_ids, special=True) for one in found] == ["42</s>", "42<|im_end|>"]
