"""Servers of the reward: what one is launched with, and what is refused before a run."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from laminar_py.config.reward import RewardConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.sglang.launch import LOOPBACK, ServerSpec, check_pool, pool_server

TERM = {"kind": "steps", "servers": "prm", "separator_id": 7, "labels": [5, 6]}


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    return tmp_path


def reward_of(model: Path, **settings) -> RewardConfig:
    pool = {"model": str(model), **settings}
    return RewardConfig.model_validate_json(msgspec.json.encode({"use": [TERM], "servers": {"prm": pool}}))


def spec_of(model: Path, **settings) -> ServerSpec:
    return pool_server("prm", reward_of(model, **settings).servers["prm"], Path())


def test_a_server_has_the_weights_of_its_model_on_its_gpus_and_the_users_flags(model):
    command = spec_of(model, gpus=2, flags={"mem_fraction_static": 0.7, "skip-server-warmup": False}).command(
        30000
    )
    given = dict(pairwise(command))
    wanted = {"--model-path": str(model), "--dtype": "bfloat16", "--tp-size": "2", "--device": "cuda"}
    assert wanted.items() <= given.items()
    assert (given["--host"], given["--port"], given["--mem-fraction-static"]) == (LOOPBACK, "30000", "0.7")
    assert not {"--load-format", "--base-gpu-id", "--skip-server-warmup"} & set(command)


def test_a_judge_may_speculate_by_any_algorithm_since_its_weights_stay_the_same(model):
    flags = {"speculative-algorithm": "EAGLE3", "speculative-accept-threshold-acc": 0.9}
    given = dict(pairwise(spec_of(model, gpus=1, flags=flags).command(30000)))
    assert (given["--speculative-algorithm"], given["--speculative-accept-threshold-acc"]) == ("EAGLE3", "0.9")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"flags": {"port": 1}}, r"reward\.servers\.prm\.flags\.port=1: the run chooses it; leave it out"),
        ({"flags": {"api_key": "k"}}, r"flags\.api_key=k: the run chooses it"),
        (
            {"gpus": 0, "flags": {"max-total-tokens": 9, "speculative-algorithm": "NGRAM"}},
            r"reward\.servers\.prm\.flags\.speculative-algorithm=NGRAM: off CUDA",
        ),
        ({"flags": {"tp-size": 2}}, r"flags\.tp-size=2: set reward\.servers\.prm\.gpus"),
        ({"flags": {"model": "m"}}, r"flags\.model=m: set reward\.servers\.prm\.model"),
        (
            {"gpus": 0},
            r"reward\.servers\.prm\.flags\.max-total-tokens=None: on a CPU it would take all memory; set",
        ),
        ({"python": sys.executable}, r"reward\.servers\.prm\.python=.*: has no SGLang; name the interpreter"),
        ({"python": "/none"}, r"reward\.servers\.prm\.python=/none: does not run"),
        ({"model": "/none"}, r"reward\.servers\.prm\.model=/none: no config\.json in it"),
    ],
)
def test_a_server_that_cannot_start_is_refused_with_one_line(model, settings, complaint):
    reward = reward_of(model, **settings) if "model" not in settings else reward_of(Path(settings["model"]))
    with pytest.raises(ConfigError, match=complaint) as caught:
        check_pool(reward, "prm")
    assert "\n" not in str(caught.value)
