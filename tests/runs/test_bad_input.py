"""Bad input: one line that names field, value and remedy, exit code 2, no process and no run left behind."""

import asyncio
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from laminar_contrib.sandbox.inside.seccomp import BY_MACHINE
from laminar_py.cli import app, main
from tests.ledger.runs import begin, checkpoint, open_ledger
from tests.runs.runs import LAMINAR, REPO, quickstart_model
from tests.sandbox.machines import laminar_without_sandbox

CONFIG = "configs/quickstart.yaml"
TRAIN = "experiments/quickstart/data/train.jsonl"


def train(*settings):
    """Exit code and lines on standard error."""
    done = subprocess.run(
        [LAMINAR, "train", CONFIG, *settings], cwd=REPO, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr.strip().splitlines()


def in_process(monkeypatch, capsys, *settings):
    """The same, without the second that a process takes to start."""
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(sys, "argv", [LAMINAR, "train", CONFIG, *settings])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, capsys.readouterr().err.strip().splitlines()


def children():
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stepz=3", "stepz=3: unknown key"),
        ("steps=many", "steps='many': input should be a valid integer"),
        ("learner.compile=yes", "learner.compile='yes': is neither true nor false; write true or false"),
        ("data.chat.texts=off", "data.chat.texts='off': is neither true nor false; write true or false"),
        ("reward.use=environment", "reward.use=environment: no environment ends a trajectory with a reward"),
        ("environment=envs.py", "environment='envs.py': names no class; write path/to/file.py:Class"),
        (
            "environment={kind: tools, tools: {use: [python]}}",
            "sandbox.slots=2: up to 512 trajectories are in flight for",
        ),
        (
            "environment={path: 'a.py:A', most_kept: 9}",
            "environment.most_kept=9: up to 512 trajectories are in flight",
        ),
        ("environment={kind: toolz}", "environment.kind=toolz: unknown; choose one of class, agent,"),
        ("learner.lr=-1", "learner.lr=-1: input should be greater than 0"),
        ("model.path=/nowhere", "model.path=/nowhere: no config.json in it"),
        ("data.train=/nowhere.jsonl", "data.train=/nowhere.jsonl: no such file"),
        (
            f"data.train={{path: {TRAIN}, columns: {{prompt: question}}}}",
            f"data.train={TRAIN}:1: no column 'question', which data.train.columns names; choose from prompt",
        ),
        (f"eval.sets={{x: {TRAIN}}}", f"eval.sets.x={TRAIN}:1: prompt also in data.train={TRAIN}:"),
        (f"data.train=[{TRAIN}, /nowhere.jsonl]", "data.train.1=/nowhere.jsonl: no such file"),
        ("data.order=curriculum", f"data.train={TRAIN}:1: 'level' holds no number or text"),
        ("reward.use=[best]", "reward.use.kind=best: unknown"),
        ("reward.use=[rw.py]", "reward.use=rw.py: a file needs its function; write rw.py:score"),
        ("algorithm.overlong_tokens=9999", "algorithm.overlong_tokens=9999 is more than rollout.sampling."),
        ("learner.offload=true", "learner.offload=true: the learner is on cpu"),
        ("relay.shm=/nowhere", "relay.shm=/nowhere: no such folder"),
        ("relay.keep_versions=100000000", "relay.shm=/dev/shm:"),
        ("data.prepare=/nowhere.py", "data.prepare=/nowhere.py: no such file"),
        ("rollout.record=[routed_experts]", "rollout.record=routed_experts: the model in model.path has no"),
        ("rollout.engine={kind: sglang, python: /nowhere}", "rollout.engine.python=/nowhere: does not run"),
        ("rollout.engine={kind: sglang}", f"rollout.engine.python={Path(sys.executable).parent}"),
        (
            "rollout.engine={kind: sglang, urls: [http://127.0.0.1:1, http://127.0.0.1:2]}",
            "rollout.engine.urls=http://127.0.0.1:1: does not answer",
        ),
        ("nonsense", "override=nonsense: not of the form key=value"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, setting, message):
    before = children()
    code, lines = in_process(monkeypatch, capsys, f"runs={tmp_path}", setting)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"laminar: {message}")
    assert list(tmp_path.iterdir()) == []
    assert children() <= before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def make():\n    raise KeyError('x')\n\nmake()\n",
            "data.prepare=PATH: exit code 1 (KeyError: 'x' at PATH:2);",
        ),
        ("1 +\n", "data.prepare=PATH: exit code 1 (SyntaxError: invalid syntax at PATH:1); fix the script"),
        ("import sys; sys.exit('no network')\n", "data.prepare=PATH: exit code 1 (no network); fix the script"),
        ("import os; os.write(2, b'caf\\xe9'); 1 / 0\n", "data.prepare=PATH: exit code 1 (ZeroDivisionError: "),
        ("", "model.path=none: no config.json in it, and data.prepare=PATH ran and did not make it; name the"),
    ],
)
def test_a_script_that_makes_no_data_is_told_with_its_line(tmp_path, monkeypatch, capsys, text, message):
    script = tmp_path / "make.py"
    script.write_text(text)
    code, lines = in_process(monkeypatch, capsys, f"runs={tmp_path}", f"data.prepare={script}", "model.path=none")
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(f"laminar: {message.replace('PATH', str(script))}")


def test_a_broken_line_of_a_prompt_file_is_named(tmp_path, monkeypatch, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "e-2;o*7;1x5?", "answer": "7"}\n{"prompt": "e-2;\n')
    code, lines = in_process(monkeypatch, capsys, f"runs={tmp_path / 'runs'}", f"data.train={path}")
    assert code == 2
    assert len(lines) == 1
    assert f"data.train={path}:2" in lines[0]


ASSERTS = {"entry_point": "f", "asserts": "assert f(2 == 4"}
JUDGE = "{kind: judge, urls: [http://127.0.0.1:1/v1], model: m}"


@pytest.mark.parametrize(
    ("problem", "reward", "line", "remedy"),
    [
        ({"tests": ASSERTS}, "use=[code]", "data.train=PATH:2: `tests.asserts` does not parse", "fix it, or"),
        ({"answer": "\\frac{1}{"}, "use=[math]", "data.train=PATH:2: the reference answer", "fix it, or"),
        (
            {},
            "by_task={cod: [code]}",
            "reward.by_task.cod: no problem has this task",
            "remove it, or name one of the tasks",
        ),
        ({}, "use=[jugde]", "reward.use.kind=jugde: unknown", "choose one of environment, function"),
        ({}, f"use=[{JUDGE}]", "reward.use: urls=http://127.0.0.1:1/v1 of judge: does not answer", "start it or"),
    ],
    ids=["tests", "reference", "task", "kind", "judge"],
)
def test_a_reward_that_cannot_be_given_is_told_before_a_run(
    tmp_path, monkeypatch, capsys, problem, reward, line, remedy
):
    path = tmp_path / "prompts.jsonl"
    first = {"prompt": "e-2;o*7;1x5?", "answer": "7", "tests": {"inputs": ["1"], "outputs": ["1"]}}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(first | problem)}\n")
    alone = ("warm_start=null", "eval.sets={}", f"runs={tmp_path / 'runs'}")
    code, lines = in_process(monkeypatch, capsys, *alone, f"data.train={path}", f"reward.{reward}")
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(f"laminar: {line.replace('PATH', str(path))}")
    assert remedy in lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", [None, "def score(\n", "import no_such_package\n", "other = 1\n"])
def test_a_file_of_rewards_that_cannot_be_had_is_one_line(tmp_path, monkeypatch, capsys, text):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    wanted = f"reward.use=[{tmp_path / 'mine.py'}:score, {tmp_path / 'mine.py'}:other]"
    before = children()
    code, lines = in_process(monkeypatch, capsys, f"runs={tmp_path / 'runs'}", wanted)
    assert (code, len(lines)) == (2, 1)
    assert str(tmp_path / "mine.py") in lines[0]
    assert children() <= before


@pytest.mark.skipif(platform.machine() not in BY_MACHINE, reason="the kernel's calls are not known")
def test_a_sandbox_that_cannot_be_had_is_one_line_that_says_why(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "e-2;o*7;1x5?", "tests": {"inputs": ["1"], "outputs": ["1"]}}\n')
    alone = ("warm_start=null", "eval.sets={}", f"runs={tmp_path / 'runs'}")
    done = laminar_without_sandbox("train", CONFIG, *alone, f"data.train={path}", "reward.use=[code]")
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2
    assert line.startswith("laminar: sandbox.require=landlock: this machine does not offer it (")
    assert "no Landlock" in line
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(quickstart_model(), tmp_path / "model")
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sizes | {"vocab_size": 7}))
    code, lines = in_process(monkeypatch, capsys, f"runs={tmp_path / 'runs'}", f"model.path={folder}")
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"laminar: model.path={folder}: its tokenizer has ")


def test_an_architecture_that_is_not_served_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(quickstart_model(), tmp_path / "model")
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sizes | {"architectures": ["MixtralForCausalLM"]}))
    before = children()
    code, lines = in_process(monkeypatch, capsys, f"runs={tmp_path / 'runs'}", f"model.path={folder}")
    assert (code, len(lines)) == (2, 1)
    assert "architecture MixtralForCausalLM is none of Qwen3ForCausalLM" in lines[0]
    assert children() <= before


def test_resuming_what_does_not_exist_is_refused(tmp_path):
    code, lines = train(f"runs={tmp_path}", "--resume")
    assert code == 2
    assert "no run in" in lines[0]


def test_resuming_from_a_torn_checkpoint_is_refused_and_loses_nothing(tmp_path):
    run = tmp_path / "quickstart-1"
    torn = run / "checkpoints/step-1"
    torn.mkdir(parents=True)
    (torn / ".metadata").write_bytes(b"half")
    shutil.copyfile(REPO / CONFIG, run / "config.yaml")

    async def record():
        async with open_ledger(run) as ledger:
            begin(ledger)
            ledger.append(checkpoint(1, 0))

    asyncio.run(record())
    before = (run / "ledger.sqlite").read_bytes()
    code, lines = train(f"runs={tmp_path}", "--resume")
    assert code == 2
    assert lines == [
        f"laminar: checkpoint={torn}: half written or damaged (has no complete.json); restore or delete it;"
        " without it the run has no checkpoint, so start a new run"
    ]
    assert (run / "ledger.sqlite").read_bytes() == before
    assert (torn / ".metadata").exists()


def test_a_truncated_ledger_is_refused_by_the_audit(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 100)
    done = subprocess.run(
        [LAMINAR, "audit", str(tmp_path), "verify"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


def every_command(commands, *words):
    for name in commands.list_commands(None):
        command = commands.get_command(None, name)
        more = ["x"] if name == "audit" else []
        yield from (
            every_command(command, *words, name, *more) if hasattr(command, "commands") else [[*words, name]]
        )


def test_every_command_has_help_with_an_example():
    found = list(every_command(typer.main.get_command(app)))
    assert len(found) >= 25
    for words in found:
        told = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "300"})
        assert told.exit_code == 0
        assert "Example:" in told.stdout, words
    assert shutil.which(LAMINAR)


def test_help_reads_as_it_was_written():
    told = CliRunner().invoke(app, ["data", "--help"], env={"COLUMNS": "300"}).stdout
    assert (
        "one rendered prompt, duplicates, leaks between training and evaluation, and problems that are too long."
        in told
    )
    told = CliRunner().invoke(app, ["rescore", "--help"], env={"COLUMNS": "300"}).stdout
    assert "'reward.use=[math]'" in told, "brackets are no markup"
