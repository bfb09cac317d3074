"""`laminar data`: figures of the problems of a run or of a file, and what a run would refuse."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from laminar_lab.doctor.checks import fit_pretended, pretended_cluster
from laminar_lab.tiny_models import tiny_model, write_data
from laminar_py.cli import app
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from tests.data.templates import TEMPLATES, make_tokenizer_folder

ROWS = [{"question": "2+2=", "value": {"answer": "4"}, "level": n % 2} for n in range(3)]


def shown(*arguments: object) -> tuple[int, str]:
    """Exit code and output of the command."""
    done = CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "200"})
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done.exit_code, done.output


def config(folder: Path, **data: object) -> Path:
    """A run's config, with a model whose template is `chatml`."""
    make_tokenizer_folder(folder / "model", TEMPLATES["chatml"].text)
    problems = [[{"role": "user", "content": text}] for text in ("a", "a", "b" * 99, "\x1b[31m red")]
    for name, wanted in (("train", problems), ("aime", [problems[0], problems[3]])):
        lines = [json.dumps({"prompt": one, "answer": "1", "level": 2, "task": "t"}) for one in wanted]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    settings = {
        "name": "t",
        "steps": 1,
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl"), **data},
        "reward": {"use": ["math"]},
        "rollout": {"max_len": 190, "sampling": {"max_new_tokens": 60}},
        "eval": {"sets": {"aime": {"path": str(folder / "aime.jsonl")}}},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))
    return folder / "run.yaml"


def test_a_run_with_leaks_and_prompts_that_are_too_long_is_told_and_exits_with_1(tmp_path):
    code, output = shown(config(tmp_path, chat={"system": "Be brief."}))
    assert code == 1
    assert "data.train: fields answer 4, messages 4, level 4" in output
    assert "data.train: tasks t 4" in output
    assert "data.train: levels 2 4" in output
    room = "tokens that rollout.max_len leaves beside a whole response"
    long = f"data.train: 1 prompt has more than the 130 {room}, the first in data.train={tmp_path}/train.jsonl:3\n"
    assert long in output
    leak = f"{tmp_path}/aime.jsonl:1 is data.train={tmp_path}/train.jsonl:1"
    assert f"eval.sets.aime: 2 prompts are trained on, e.g. eval.sets.aime={leak}" in output
    (row,) = [line for line in output.splitlines() if "│ data.train " in line]
    assert [cell.strip() for cell in row.split("│")[2:8]] == ["4", "39", "137", "137", "1", "1"]


def test_an_evaluation_set_has_the_room_that_its_own_cap_leaves(tmp_path):
    path = config(tmp_path)
    settings = json.loads(path.read_text())
    settings["eval"]["sets"]["aime"] |= {"max_new_tokens": 150}
    path.write_text(json.dumps(settings))
    _, output = shown(path)
    assert "eval.sets.aime: 2 prompts have more than the 40 tokens that rollout.max_len leaves beside a" in output


def test_a_problem_without_a_level_is_refused_where_the_run_would(tmp_path):
    with pytest.raises(ConfigError, match=r"^data\.train=.*train\.jsonl:1: 'hard' holds no number or text"):
        shown(config(tmp_path, order="curriculum", level="hard"))


def test_counts_of_tasks_are_bounded(tmp_path):
    rows = [json.dumps({"prompt": f"a{row}", "task": f"t{row:02}"}) for row in range(50)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    _, output = shown(tmp_path / "t.jsonl", "--model", make_tokenizer_folder(tmp_path / "model", None))
    assert "data: tasks t00 1, t01 1, " in output
    assert ", t19 1, and 30 more\n" in output


def test_the_rendered_prompt_is_shown_with_what_ends_a_response(tmp_path):
    _, output = shown(config(tmp_path))
    assert "prompt p0, 46 tokens; a response ends with '<|im_end|>' (id 4) or '</s>' (id 2)" in output
    assert "  <|im_start|>system\n  You are helpful.<|im_end|>\n  <|im_start|>user\n  a<|im_end|>\n" in output


def test_a_file_alone_is_shown_with_a_model(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    model = make_tokenizer_folder(tmp_path / "model", None)
    mapping = ["--column", "prompt=question", "--column", "answer=value.answer"]
    code, output = shown(tmp_path / "t.parquet", "--model", model, *mapping)
    assert code == 0
    assert "data: levels 0 2, 1 1" in output
    assert "prompt p0, 5 tokens; a response ends with '</s>' (id 2)\n  2+2=\n" in output


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["t.jsonl"], r"data=t\.jsonl: counts tokens; name the model's folder with --model"),
        (["t.jsonl", "steps=3", "--model", "m"], "steps=3: t.jsonl is no config"),
        (["t.jsonl", "--model", "m", "--column", "prompt"], "--column prompt: no column named; write ours=theirs"),
        (["t.yaml", "--model", "m"], r"config=t\.yaml: a config names its model and sources"),
    ],
)
def test_what_does_not_belong_together_is_one_line(arguments, fault):
    with pytest.raises(ConfigError, match=f"^{fault}"):
        shown(*arguments)


def word_config(folder: Path, *, tests: str = "tests", prompt: str = "plus 2", response: str = "x+2") -> Path:
    """A run's config whose model knows few words, with two problems and a demonstration."""
    write_data(folder, tiny_model([*"x+2 ", "plus"], pattern=r"[a-z]+|."))
    case = {"fn_name": "f", "inputs": [[1]], "outputs": [3]}
    rows = [{"prompt": "plus 2", "tests": case}, {"prompt": prompt, tests: case}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "w.jsonl").write_text(json.dumps({"prompt": prompt, "response": response}))
    settings = {
        "name": "t",
        "steps": 1,
        "model": {"path": str(folder / "model"), "from_scratch": True},
        "warm_start": {"data": str(folder / "w.jsonl"), "steps": 1, "tokens_per_step": 64},
        "data": {"train": str(folder / "train.jsonl")},
        "reward": {"use": ["code"]},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))
    return folder / "run.yaml"


def test_demonstrations_are_a_source_too(tmp_path):
    code, output = shown(word_config(tmp_path))
    (row,) = [line for line in output.splitlines() if "│ warm_start.data " in line]
    assert [cell.strip() for cell in row.split("│")[2:8]] == ["1", "7", "7", "7", "0", "0"]
    assert (code, "unknown" in output) == (0, False)
    told = f"demonstration warm_start.data={tmp_path}/w.jsonl:1, 4 tokens to learn"
    assert f"{told}\n  prompt 'plus' ' ' '2'\n  response 'x' '+' '2' '<eos>'\n" in output


def test_demonstrations_that_are_too_long_are_counted_and_the_first_is_named(tmp_path):
    path = word_config(tmp_path)
    rows = [{"prompt": "plus 2", "response": "x+2" * times} for times in (1, 30, 1, 40)]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = shown(path)
    told = "2 demonstrations have more than the 64 tokens of warm_start.tokens_per_step, the first in"
    assert f"warm_start.data: {told} warm_start.data={tmp_path}/w.jsonl:2\n" in output
    (row,) = [line for line in output.splitlines() if "│ warm_start.data " in line]
    assert [cell.strip() for cell in row.split("│")[2:8]] == ["4", "7", "124", "124", "2", "3"]
    assert code == 1


def test_words_that_the_tokenizer_does_not_have_are_counted_by_source(tmp_path):
    code, output = shown(word_config(tmp_path, prompt="minus 2 <unk>", response="x-2-2"))
    told = "the tokenizer's unknown token, the first"
    assert f"data.train: 1 word becomes {told} 'minus' in data.train={tmp_path}/train.jsonl:2\n" in output
    assert f"warm_start.data: 3 words become {told} 'minus' in warm_start.data={tmp_path}/w.jsonl:1\n" in output
    assert code == 0


def test_a_problem_without_what_its_reward_needs_is_told_as_a_run_does(tmp_path):
    code, output = shown(word_config(tmp_path, tests="test"))
    assert code == 1
    assert (
        f"data.train={tmp_path}/train.jsonl:2: no `tests` among its fields (test), which the reward code needs;"
        in output
    )
    assert "data.train: fields tests 1, test 1" in output


def test_control_characters_are_shown_as_such(tmp_path):
    source = config(tmp_path)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(reversed(lines)))
    _, output = shown(source)
    assert "\x1b" not in output
    assert "  \\x1b[31m red<|im_end|>" in output


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"reward": "reward.py:scor"}, "reward.py defines no function 'scor'; did you mean 'score'?"),
        ({"reward": "rewrd.py:score"}, "rewrd.py; did you mean {folder}/reward.py? Else name a Python file"),
        ({"loss": "loss.py:nosuch"}, "algorithm.objective={folder}/loss.py:nosuch: {folder}/loss.py defines no"),
        ({"loss": "loss.py:mie"}, "did you mean 'mine'? Else define it"),
    ],
)
def test_a_reward_or_a_loss_that_is_not_there_is_refused_by_data_and_doctor(settings, line, tmp_path):
    (tmp_path / "reward.py").write_text("def score(request): return 1.0\n")
    (tmp_path / "loss.py").write_text("import nowhere\n\ndef mine(inputs, settings): return inputs.logprobs\n")
    path = config(tmp_path)
    changes = [f"runs={tmp_path}"]
    if "reward" in settings:
        changes.append(f"reward.use=[{tmp_path}/{settings['reward']}]")
    if "loss" in settings:
        changes.append(f"algorithm.objective={tmp_path}/{settings['loss']}")
    with pytest.raises(ConfigError) as caught:
        shown(path, *changes)
    assert line.format(folder=tmp_path) in str(caught.value)
    fit = fit_pretended(load_config(path, changes), pretended_cluster(["1x8xH100"]))
    assert any(line.format(folder=tmp_path) in fault for fault in fit.faults)


def test_doctor_warns_of_held_out_rows_in_small_training_files(tmp_path):
    fit = fit_pretended(load_config(config(tmp_path), []), pretended_cluster(["1x8xH100"]))
    assert any("eval.sets.aime: 2 prompts are trained on, e.g." in line for line in fit.warnings)
