"""Resumes whose problems are others than those on record: refused in a line that names what has changed."""

import json
import re

import pytest

from laminar_py.config.loading import dump_config, parse_config
from laminar_py.config.section import ConfigError
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.stream import PromptStream
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.ledger.recovery import known_prompts
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.runtime.orchestrator import resume as resumed_data
from laminar_py.runtime.orchestrator.resume import refuse_other_prompts, refuse_other_rows
from laminar_py.runtime.preflight.inputs import Inputs, read_problems
from tests.builders import make_prompt
from tests.data.templates import TEMPLATES, make_tokenizer_folder
from tests.ledger.runs import begin, open_ledger

CHATML, OTHER = TEMPLATES["chatml"].text, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("now", "field"),
    [
        ({"data.train": "d0", "eval.sets.new": "d2"}, None),
        ({"data.train": "d1", "eval.sets.a": "d1"}, "data.train"),
        ({"data.train.0": "d0", "data.train.1": "d1"}, "data.train"),
        ({"data.train": "d0", "eval.sets.a": "d0"}, "eval.sets.a"),
    ],
)
async def test_a_resume_with_other_rows_is_refused(tmp_path, now, field):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, data={"data.train": "d0", "eval.sets.a": "d1"})
    if field is None:
        refuse_other_rows(RunFolder(tmp_path), now)
        return
    with pytest.raises(
        ConfigError, match=rf"^{field}: has other rows than when .* began, .*; bring the earlier rows back, or"
    ):
        refuse_other_rows(RunFolder(tmp_path), now)


def write_rows(folder, *, number=6, text="2+2=", later="", task="", spoken=True):
    """Problems, the last of them of a task of its own."""
    rows = []
    for index in range(number):
        asked = f"{text}{index}" + (later if index == number - 1 else "")
        prompt = [{"role": "user", "content": asked}] if spoken else asked
        rows.append({"prompt": prompt, "answer": "4", "task": task or ("last" if index == number - 1 else "")})
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def taken(folder, *, evaluated=False, **chat):
    """Config of a run, and its inputs as they are now."""
    there, path = str(folder / "t.jsonl"), folder / "model"
    (folder / "other.jsonl").write_text('{"prompt": "b", "id": "b"}\n')
    config = parse_config(
        {
            "name": "t",
            "steps": 1,
            "model": {"path": str(path)},
            "data": {"train": str(folder / "other.jsonl") if evaluated else there, "chat": chat},
            "eval": {"sets": {"a": there} if evaluated else {}},
            "reward": {"use": ["math"], "by_task": {}},
        }
    )
    encoder = PromptEncoder(load_tokenizer(path), path, config.data.chat)
    problems = read_problems(config, encoder, limited=True)
    return config, Inputs(
        tokenizer=encoder.tokenizer,
        stream=PromptStream(problems.train, config.data, seed=0),
        sets={name: list(of) for name, of in problems.sets.items()},
        first_of_tasks=[],
        digests=problems.digests,
    )


async def record(folder, config, inputs):
    """A run that has all its problems on record."""
    RunFolder(folder).config.write_text(dump_config(config))
    found = inputs.sets["a"] if inputs.sets else [inputs.stream.prompt(place) for place in range(6)]
    async with open_ledger(folder) as ledger:
        begin(ledger)
        for prompt in found:
            ledger.store_prompt(prompt)


def other_tokenizer(folder):
    """Its ids are others, one by one."""
    tree = json.loads((folder / "model/tokenizer.json").read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["2"], vocabulary["+"] = vocabulary["+"], vocabulary["2"]
    (folder / "model/tokenizer.json").write_text(json.dumps(tree))


CHANGES = {
    "nothing": (lambda folder: None, {}, None),
    "tokenizer": (other_tokenizer, {}, "has other token ids of the same text"),
    "template": (lambda folder: make_tokenizer_folder(folder / "model", OTHER), {}, "p0 has another text"),
    "system": (lambda folder: None, {"system": "Be brief."}, "p0 has another text"),
    "task": (lambda folder: write_rows(folder, task="sums"), {}, "p0 has another task, 'sums' and not '',"),
}


@pytest.mark.parametrize(("change", "chat", "fault"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("evaluated", [False, True])
async def test_a_resume_with_other_prompts_is_refused(tmp_path, change, chat, fault, evaluated):
    write_rows(tmp_path)
    make_tokenizer_folder(tmp_path / "model", CHATML)
    await record(tmp_path, *taken(tmp_path, evaluated=evaluated))
    change(tmp_path)
    _, inputs = taken(tmp_path, evaluated=evaluated, **chat)
    if fault is None:
        refuse_other_prompts(RunFolder(tmp_path), inputs)
        return
    with pytest.raises(ConfigError, match=f"{re.escape(fault)}.* than when the run began; bring back the rows,"):
        refuse_other_prompts(RunFolder(tmp_path), inputs)


async def test_a_sample_of_prompts_reaches_each_task(tmp_path, monkeypatch):
    monkeypatch.setattr(resumed_data, "MOST", 2)
    write_rows(tmp_path, spoken=False)
    make_tokenizer_folder(tmp_path / "model", CHATML)
    await record(tmp_path, *taken(tmp_path))
    write_rows(tmp_path, spoken=False, later="!")
    _, inputs = taken(tmp_path)
    with pytest.raises(ConfigError, match="prompt p5 has another text"):
        refuse_other_prompts(RunFolder(tmp_path), inputs)


async def test_a_sample_of_prompts_is_spread_over_all(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for index in range(100):
            ledger.store_prompt(make_prompt(index))
    found = [int(prompt.id[1:]) for prompt in known_prompts(tmp_path, most=10)]
    assert len(found) == 10
    assert all(any(low <= index < low + 20 for index in found) for low in range(0, 100, 20))
    assert len(known_prompts(tmp_path, most=100)) == 100
