"""Visits with an SGLang server on the learner's GPU, as far as they need no server: what they begin with."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from experiments.gpu import older_sglang
from experiments.gpu.servers import interpreter
from experiments.gpu.sglang_run import POLICIES, SIZES, busy_rate, run_config, write_data
from experiments.gpu.steps import FULL
from laminar_lab.bench.runs import FinishedRun
from laminar_lab.bench.workplace import count_parameters
from laminar_py.config.loading import parse_config
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.engines.sglang.launch import check_interpreter
from laminar_py.records.metrics import FleetRow

PYTHON = Path("sglang-env/bin/python")


def test_the_large_model_is_that_of_the_learners_figures():
    assert count_parameters(SIZES["cuda"].model) == count_parameters(FULL.model)


@pytest.mark.parametrize("device", SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_its_config_is_one(tmp_path, device, policy):
    tree = yaml.safe_load(json.dumps(run_config(tmp_path, SIZES[device], python=PYTHON, device=device)))
    tree["rollout"]["on_new_weights"] = policy
    config = parse_config(tree | {"name": "gpu"})
    assert config.rollout.engine.gpus == (device == "cuda")


def test_a_word_is_a_token_and_one_in_300_ends_a_response(tmp_path):
    write_data(tmp_path, SIZES["cpu"])
    tokenizer = load_tokenizer(tmp_path / "model")
    problem = json.loads((tmp_path / "prompts.jsonl").read_text().partition("\n")[0])
    words = problem["prompt"].split()
    assert [f"w{token}" for token in tokenizer.encode(problem["prompt"])] == words
    assert len(tokenizer.eos_ids) == SIZES["cpu"].model.vocab_size // 300


def test_a_busy_rate_leaves_out_the_seconds_in_which_little_runs():
    shared = {"kv_s": 0.0, "versions": [0], "waiting": [0], "kv_use": [0.0]}
    seconds = [(0, 8, 0), (1, 8, 100), (2, 8, 300), (3, 1, 310)]
    fleet = [FleetRow(rl_s=s, running=[n], generated_tokens=tokens, **shared) for s, n, tokens in seconds]
    run = FinishedRun(folder=None, summary=None, steps=[], fleet=fleet)
    assert busy_rate(run, 4) == (150.0, 2.0)


async def test_the_end_of_an_older_servers_stream_names_the_version_of_its_tokens():
    class Manager:
        async def _wait_one_response(self):
            yield {"meta_info": {"weight_version": "3", "completion_tokens": 2, "finish_reason": None}}
            yield {"meta_info": {"weight_version": "3", "completion_tokens": 5, "finish_reason": {"type": "stop"}}}

    older_sglang.add_spans(Manager)
    first, last = [out["meta_info"] async for out in Manager()._wait_one_response()]
    assert "weight_versions" not in first
    assert last["weight_versions"] == [{"version": "3", "start": 0, "end": 5}]


OTHER = """#!/bin/sh
if [ "$1" = -c ]; then echo 0.5.15; else echo "$@"; fi
"""


def test_an_older_sglang_answers_as_the_tested_one_and_starts_our_script(tmp_path):
    older = tmp_path / "older"
    older.write_text(OTHER)
    older.chmod(0o755)
    python = interpreter(older, tmp_path)
    check_interpreter(python, field="rollout.engine.python", compiles=False)
    started = subprocess.run(
        [python, "-m", "sglang.launch_server", "--port", "1 2"], capture_output=True, text=True
    )
    assert started.stdout.split()[0].endswith("experiments/gpu/older_sglang.py")
    assert started.stdout.endswith(" --port 1 2\n")
    other = subprocess.run([python, "-m", "json.tool"], capture_output=True, text=True)
    assert other.stdout == "-m json.tool\n"
