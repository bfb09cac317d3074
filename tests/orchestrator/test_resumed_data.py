"""Resumes whose problems are others than those on record: refused in a line that names what has changed."""

import json
import re

import pytest

from laminar_py.config.loading import dump_config, load_config, parse_config
from laminar_py.config.section import ConfigError
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.stream import PromptStream
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.ledger.recovery import known_prompts
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.runtime.orchestrator import resume as resumed_data
from laminar_py.runtime.orchestrator.resume import refuse_other_draws, refuse_other_prompts, refuse_other_rows
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
        ({"data.train": "d0", "warm_start.data": "d0"}, "warm_start.data"),
    ],
)
async def test_a_resume_with_other_rows_is_refused(tmp_path, now, field):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, data={"data.train": "d0", "eval.sets.a": "d1", "warm_start.data": "d2"})
    if field is None:
        refuse_other_rows(RunFolder(tmp_path), now)
        return
    with pytest.raises(
        ConfigError, match=rf"^{field}: has other rows than when .* began, .*; bring the earlier rows back, or"
    ):
        refuse_other_rows(RunFolder(tmp_path), now)


BEGAN = {
    "name": "t",
    "steps": 1,
    "model": {"path": "m"},
    "data": {"train": [{"path": "a.jsonl", "weight": 3}, "b.jsonl"]},
    "reward": {"use": ["math"]},
    "warm_start": {"data": "d.jsonl"},
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("seed=9", "seed=9: .* began with 0, "),
        (
            "data.train=[{path: a.jsonl, weight: 1}, b.jsonl]",
            r"data.train.weight=\[1.0, 1.0\]: .* with \[3.0, 1.0\]",
        ),
        ("data.order=signal", 'data.order=signal: .* with "shuffled"'),
        ("data.opens_at=0.9", "data.opens_at=0.9: .* with 0.5"),
        ("data.chat.system=hi", "data.chat.system=hi: .* with null"),
        ("rollout.sampling.temperature=0.7", "rollout.sampling.temperature=0.7: .* with 1.0"),
        ("rollout.record=[routed_experts]", r"rollout.record=.*routed_experts.*: .* with \[\]"),
        ("warm_start.steps=3", "warm_start.steps=3: .* with 500"),
        ("warm_start=null", "warm_start.*=null: "),
        ("learner.lora.rank=8", "learner.lora.rank=8: .* began with null, "),
        ("environment=a.py:A", "environment.kind=class: .* with null"),
    ],
)
def test_a_resume_with_a_setting_that_decided_what_was_drawn_is_refused(tmp_path, change, line):
    run = RunFolder(tmp_path)
    run.config.write_text(dump_config(parse_config(BEGAN)))
    with pytest.raises(ConfigError, match=f"^{line}.*; leave the setting out, or start a new run$"):
        refuse_other_draws(run, load_config(run.config, [change]))


def test_a_resume_may_move_files_and_change_what_later_steps_do(tmp_path):
    run = RunFolder(tmp_path)
    run.config.write_text(dump_config(parse_config(BEGAN)))
    moved = [
        "data.train=[{path: x/a.jsonl, weight: 3}, b.jsonl]",
        "warm_start.data.path=x/d.jsonl",
        "model.path=n",
    ]
    later = ["steps=9", "rollout.group_size=4", "learner.lr=1e-3", "reward.use=[r.py:score]", "schedule=sync"]
    refuse_other_draws(run, load_config(run.config, [*moved, *later, "rollout.replicas=1"]))


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
