"""Examples of docs/samples.md."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laminar_py.cli import app
from laminar_py.records.events import Ready, Restamped
from laminar_py.records.spans import Span
from tests.ledger.runs import begin, consume, open_ledger
from tests.samples.runs import (
    begin_sample,
    encode,
    end_sample,
    grow_sample,
    make_model,
    write_config,
    write_sample,
)

PAGE = (Path(__file__).parents[2] / "docs/samples.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
async def folder(tmp_path, monkeypatch):
    """The folder where the run of the page was started."""
    monkeypatch.chdir(tmp_path)
    model = make_model(tmp_path / "model")
    run = tmp_path / "runs/quickstart-1"
    write_config(run, "model")
    wrong, right = encode(model, "I guess 7"), encode(model, "12 and 30 are 42</s>")
    asked = {"problem": "p17", "prompt": "12 + 30 =", "answer": "42"}
    async with open_ledger(run) as ledger:
        begin(ledger, versions=range(5))
        write_sample(ledger, "g3.0", wrong, reward=0.0, **asked)
        ledger.append_all(consume(2, 2, "g3.0"))
        write_sample(ledger, "g17.0", wrong, reward=0.0, **asked)
        begin_sample(ledger, "g17.1", **asked)
        grow_sample(ledger, "g17.1", right, version=3)
        spans = (Span(3, 0, 10), Span(4, 10, len(right)))
        ledger.append(Restamped("g17.1", spans))
        end_sample(ledger, "g17.1", right, spans, verdict="right: 42", answer="42")
        ledger.append(Ready("g17.1", 0.5))
        ledger.append_all(consume(5, 4, "g17.0", "g17.1", staleness=1))
    return tmp_path


def laminar(*words):
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


async def test_the_page_shows_what_the_command_does(folder):
    (example,) = blocks("text")
    assert example in laminar("samples", "runs/quickstart-1", "g17.1")


async def test_every_command_on_the_page_is_one(folder):
    for line in blocks("bash")[0].splitlines():
        _, *words = shlex.split(line, comments=True)
        assert laminar(*words)
    (code,) = blocks("python")
    exec(compile(code, "samples.md", "exec"), {})
