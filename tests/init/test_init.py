"""`laminar init` as a user calls it: configs for six combinations, questions on a terminal, mistakes."""

import json
import os
import pty
import subprocess

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from laminar_lab.doctor.checks import fit_pretended, pretended_cluster
from laminar_lab.emulation.settings import read_profile
from laminar_lab.simulate.run import simulate
from laminar_lab.tiny_models import tiny_model, write_data
from laminar_py.cli import app
from laminar_py.config import ConfigError, load_config
from tests.doctor.test_memory import SMOLLM2
from tests.engines.sglang.rig import sglang_python
from tests.init.test_translation import TRL, VERL
from tests.runs.runs import LAMINAR, REPO

TEMPLATE = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
MOST_LINES = 35
PROFILE = REPO / "configs/emulation/h100_7b_tp1.yaml"
SMOL = {key: value for key, value in SMOLLM2.items() if key != "torch_dtype"}
TUNING = ("--lora", "--full")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a tiny pretrained model, problems, and a reward that differs within a group."""
    folder = tmp_path_factory.mktemp("home")
    write_data(folder, tiny_model(list("0123456789+=:"), pattern=".", template=TEMPLATE))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(
        folder / "model"
    )
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    for name, part in (("train.jsonl", rows[:80]), ("heldout.jsonl", rows[80:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "reward.py").write_text("def score(request):\n    return float(len(request.response_ids) % 2)\n")
    return folder


@pytest.fixture
def here(home, tmp_path, monkeypatch):
    """The working directory: `home`, with a place for configs of this test."""
    monkeypatch.chdir(home)
    return tmp_path


TASK = ("--data", "train.jsonl", "--heldout", "heldout.jsonl", "--reward", "reward.py:score")


def init(*arguments):
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


def config_of(folder, *arguments):
    """The text and the config that `laminar init` writes."""
    out = folder / "mine.yaml"
    done = init(out, *arguments)
    assert done.exit_code == 0, done.output + str(done.exception)
    return out, load_config(out, [])


@pytest.mark.parametrize("tuning", TUNING)
def test_a_config_for_this_machine_is_short_and_every_line_says_what_it_is(tuning, here):
    out, config = config_of(here, "--model", "model", *TASK, tuning)
    lines = out.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if "#" not in line and not line.endswith(":")] == []
    assert config.rollout.engine.kind == "local"
    assert (config.learner.lora is not None) == (tuning == "--lora")
    assert config.rollout.max_len == 320, "the longest prompt has 6 tokens, a response 256"
    assert config.data.chat.texts, "the tokenizer has a template"


@pytest.mark.slow
@pytest.mark.parametrize("tuning", TUNING)
def test_a_config_for_this_machine_runs(tuning, here):
    out, _ = config_of(here, "--model", "model", *TASK, tuning)
    run_two_steps(here, out)


@pytest.mark.sglang
@pytest.mark.parametrize("tuning", TUNING)
def test_a_config_for_sglang_on_this_machine_runs(tuning, here):
    engine = ("--engine", "sglang", "--sglang-python", sglang_python())
    out, _ = config_of(here, "--model", "model", *TASK, tuning, *engine)
    run_two_steps(here, out)


def run_two_steps(folder, config):
    done = subprocess.run(
        [LAMINAR, "train", str(config), "steps=2", f"runs={folder}"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "mine-1/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["trained_tokens"] > 0


SIZES_05B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("gigabytes", "tuning", "replicas"), [(64, "--full", 4), (24, "--full", 1), (24, "--lora", 3)]
)
def test_replicas_fit_the_memory_of_this_machine(gigabytes, tuning, replicas, here, monkeypatch):
    """The learner takes 17 GB, or 11 with adapters, and a replica 4 GB: half weights, half cache."""
    machine(here, monkeypatch, gigabytes)
    _, config = config_of(here, "--model", here / "0.5B", *TASK[:2], "--reward", "reward.py:score", tuning)
    assert config.rollout.replicas == replicas


def test_a_model_that_this_machine_cannot_hold_is_refused_in_one_line(here, monkeypatch):
    machine(here, monkeypatch, 8)
    line = str(init(here / "mine.yaml", "--model", here / "0.5B", "--data", "train.jsonl", "--full").exception)
    assert "learner and engine need 20.1 GB by formula, and this machine has 8.0; choose --lora, a smaller" in line


def machine(here, monkeypatch, gigabytes):
    """Make this a machine of 16 cores, with a model of 494 million parameters."""
    (here / "0.5B").mkdir()
    (here / "0.5B/config.json").write_text(json.dumps(SIZES_05B))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16))
    monkeypatch.setattr("laminar_lab.init.choices.host_memory", lambda: gigabytes * 1e9)


@pytest.mark.parametrize("tuning", TUNING)
def test_a_config_for_8_gpus_passes_doctor_and_simulator(tuning, here, monkeypatch):
    out, config = config_of(here, "--model", "7B", *TASK, tuning, "--on", "8xH100")
    fit = fit_pretended(config, pretended_cluster(["1x8xH100"]))
    assert (fit.faults, fit.warnings, fit.unplaced) == ([], [], None)
    assert config.gpus == 8
    assert config.data.chat.texts, "7B stands for Qwen2.5-7B, whose prompts are chats"
    assert len(out.read_text().splitlines()) <= MOST_LINES
    monkeypatch.chdir(REPO)
    emulated = load_config(
        out,
        [
            "steps=2",
            "eval.sets={}",
            "rollout.engine.kind=emulated",
            f"rollout.engine.profile={PROFILE}",
            f"rollout.engine.learner_devices={config.learner.world_size}",
            "learner.world_size=1",
            "learner.lora=null",
        ],
    )
    rows = simulate(emulated, profile=read_profile(PROFILE)).rows
    assert [row.step for row in rows] == [1, 2]
    assert max(row.staleness_max for row in rows) <= config.staleness.max_staleness


@pytest.mark.parametrize("dtype", [{"dtype": "float32"}, {"torch_dtype": "bfloat16"}, {}])
def test_a_config_for_a_small_model_on_8_gpus_passes_doctor(dtype, here):
    """SmolLM2-135M is served in float32, as its config.json says."""
    (here / "smol").mkdir()
    (here / "smol/config.json").write_text(json.dumps(SMOL | dtype))
    _, config = config_of(here, "--model", here / "smol", *TASK, "--lora", "--on", "1x8xH100")
    fit = fit_pretended(config, pretended_cluster(["1x8xH100"]))
    assert (fit.faults, fit.warnings, fit.unplaced) == ([], [], None)


def test_the_learner_of_a_small_model_gets_no_gpu_that_gains_nothing(here):
    """32 responses a step: by formula 3 learner GPUs are 2 % faster than 2, and 7 much slower."""
    (here / "smol").mkdir()
    (here / "smol/config.json").write_text(json.dumps(SMOL | {"dtype": "float32"}))
    (here / "grpo.yaml").write_text(
        "per_device_train_batch_size: 8\ngradient_accumulation_steps: 4\nnum_processes: 1\nnum_generations: 8\n"
        "use_peft: true\nmax_completion_length: 48\nmax_steps: 50\n"
    )
    options = ("--from", "trl", here / "grpo.yaml", "--model", here / "smol", "--on", "1x8xH100")
    _, config = config_of(here, *options, *TASK)
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (4, 8)
    assert (config.learner.world_size, config.rollout.replicas) == (3, 5)


def test_settings_that_people_change_are_options(here):
    options = ("--steps", "7", "--lr", "3e-4", "--max-new-tokens", "99", "--name", "hans")
    _, config = config_of(here, "--model", "model", *TASK, *options)
    assert (config.steps, config.learner.lr, config.name) == (7, 3e-4, "hans")
    assert config.rollout.sampling.max_new_tokens == 99
    (here / "mine.yaml").unlink()
    (here / "grpo.yaml").write_text("model_name_or_path: model\nmax_completion_length: 12\nlearning_rate: 1e-5\n")
    _, config = config_of(here, "--from", "trl", here / "grpo.yaml", *TASK, *options)
    assert (config.steps, config.learner.lr, config.name) == (7, 3e-4, "hans"), "an option goes before the file"
    assert config.rollout.sampling.max_new_tokens == 99


THEIR_REWARD = "model_name_or_path: model\nreward_funcs: [rewards.sort_reward, think_format_reward]\n"


def test_a_reward_of_trl_stays_until_it_is_adapted_or_replaced(here):
    (here / "grpo.yaml").write_text(THEIR_REWARD)
    done = init(here / "mine.yaml", "--from", "trl", here / "grpo.yaml", *TASK[:2])
    assert done.exit_code == 0, done.exception
    assert done.output.startswith("rewards.py:sort_reward stops the run until you adapt it to def score(request)")
    own, form = load_config(here / "mine.yaml", []).reward.use
    assert (own.path, form.kind) == ("rewards.py:sort_reward", "format")
    done = init(here / "b.yaml", "--from", "trl", here / "grpo.yaml", *TASK)
    line = done.output.splitlines()[0]
    assert line.startswith("--reward=reward.py:score takes the place of the reward in ")
    assert "'kind': 'format'" in line, "the file's second term is not added"
    assert "stops the run" not in done.output


def test_a_reward_without_a_counterpart_is_refused_unless_another_is_named(here):
    (here / "grpo.yaml").write_text(THEIR_REWARD.replace("rewards.sort_reward", "my_reward"))
    arguments = ("--from", "trl", here / "grpo.yaml", *TASK[:2])
    line = str(init(here / "mine.yaml", *arguments).exception)
    assert "my_reward: no counterpart, and a run would train on the rest alone; or name your reward by" in line
    assert not (here / "mine.yaml").exists()
    assert init(here / "mine.yaml", *arguments, "--reward", "reward.py:score").exit_code == 0


def test_a_pipe_is_read(home, tmp_path):
    command = f"{LAMINAR} init {tmp_path}/mine.yaml --from trl <(echo 'learning_rate: 1e-5') --model model"
    done = subprocess.run(
        ["bash", "-c", f"{command} --data train.jsonl"], cwd=home, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert load_config(tmp_path / "mine.yaml", []).learner.lr == 1e-5


def test_a_file_of_trl_is_completed_by_the_data_here(here):
    """Its 3 epochs of 80 rows in steps of 4 prompts are 60 steps."""
    text = "model_name_or_path: model\nper_device_train_batch_size: 32\nlearning_rate: 1e-5\nlogging_steps: 1\n"
    (here / "grpo.yaml").write_text(text)
    _, config = config_of(here, "--from", "trl", here / "grpo.yaml", *TASK)
    assert (config.steps, config.rollout.prompts_per_step, config.learner.lr) == (60, 4, 1e-5)
    assert config.learner.lora is None
    assert config.algorithm.aggregation == "token_mean", "TRL's default"
    assert (
        "  logging_steps=1: every step is logged"
        in init(here / "b.yaml", "--from", "trl", here / "grpo.yaml", *TASK).output
    )


@pytest.mark.parametrize(("trainer", "text"), [("trl", TRL), ("verl", VERL)])
def test_a_file_of_another_trainer_becomes_a_config_for_8_gpus(trainer, text, here):
    (here / "given.sh").write_text(text)
    (here / "given.yaml").write_text(text)
    given = here / ("given.yaml" if trainer == "trl" else "given.sh")
    done = init(here / "mine.yaml", "--from", trainer, given, "--on", "8xH100")
    assert done.exit_code == 0, done.exception
    config = load_config(here / "mine.yaml", [])
    assert str(config.model.path) == "models/Qwen2.5-7B"
    assert "epochs: the rows cannot be counted; set steps" in done.output
    fit = fit_pretended(config, pretended_cluster(["1x8xH100"]))
    assert (fit.faults, fit.warnings) == ([], [])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--data", "train.jsonl"], "--model: missing; name the model folder, or for GPUs a size such as 7B"),
        (["--model", "model"], "--data: missing; name the problems, a JSONL or Parquet file"),
        (["--model", "nowhere", "--data", "train.jsonl"], "model=nowhere: no folder, and no model that is known"),
        (["--model", ".", "--data", "train.jsonl"], "--model=.: no config.json in it; name a model folder"),
        (
            ["--model", "7B", "--data", "train.jsonl"],
            "--model=7B: no config.json in it; name a model folder, or GPUs",
        ),
        (["--model", "Qwen3-30B-A3B", *TASK, "--on", "8xH100"], "--lora: Qwen3-30B-A3B is a mixture of experts"),
        (["--model", "model", *TASK[:4], "--reward", "exact"], "--reward=exact: write math, code, or file.py"),
        (["--model", "model", "--data", "gone.jsonl"], "--data=gone.jsonl: no such file; name a JSONL"),
        (["--model", "model", "--data", "train.jsonl", "--on", "8xV1"], "--on=8xV1: neither here nor GPUs that"),
        (["--model", "14B", "--data", "train.jsonl", "--on", "1xA100"], "gpus=1: "),
        (["--model", "model", *TASK, "--engine", "vllm"], "--engine=vllm: choose embedded or sglang"),
        (["--model", "model", *TASK[:4], "--reward", "gone.py:f"], "--reward=gone.py:f: no such file"),
        (["--model", "model", *TASK[:4], "--reward", "code"], "which the reward code needs"),
        (
            ["--model", "7B", *TASK, "--on", "8xH100", "--engine", "embedded"],
            "--engine=embedded: computes on CPUs",
        ),
        (["--from", "trl", "gone.yaml"], "gone.yaml: no such file"),
    ],
)
def test_a_mistake_is_one_line(arguments, line, here):
    done = init(here / "mine.yaml", *arguments)
    assert isinstance(done.exception, ConfigError), done.output
    assert line in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not (here / "mine.yaml").exists()


def test_a_config_is_never_overwritten(here):
    (here / "mine.yaml").write_text("kept")
    assert "exists already" in str(init(here / "mine.yaml", "--model", "model", *TASK).exception)
    assert (here / "mine.yaml").read_text() == "kept"


def test_on_a_terminal_it_asks_again_after_a_wrong_answer(home, tmp_path):
    ours, theirs = pty.openpty()
    command = [LAMINAR, "init", str(tmp_path / "mine.yaml")]
    asking = subprocess.Popen(command, cwd=home, stdin=theirs, stdout=subprocess.PIPE, text=True)
    os.write(ours, b"model\ngone.jsonl\ntrain.jsonl\n\nmath\nfull\nhere\nembedded\n")
    output, _ = asking.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert asking.returncode == 0, output
    assert "--data=gone.jsonl: no such file" in output
    config = load_config(tmp_path / "mine.yaml", [])
    assert str(config.model.path) == "model"
    assert config.learner.lora is None
    assert config.eval.sets == {}
