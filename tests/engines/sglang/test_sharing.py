"""The server of a replica that takes turns with the learner: its flags, and the GPUs that it sees."""

from pathlib import Path

import pytest

from laminar_py.config.engine import EngineLaunch
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.engines.sglang.backend import _server_of
from tests.runs.runs import REPO

SHARING = ("cluster.share=true", "rollout.kv_capacity=200000")


@pytest.fixture
def config_of(tmp_path):
    """A run of 4 learner ranks and 6 replicas on SGLang, with changes."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "dtype": "bfloat16"}')

    def load(*changes: str, replicas: int = 6):
        settings = (f"rollout.replicas={replicas}", "learner.world_size=4", f"model.path={tmp_path}")
        return load_config(REPO / "experiments/math_long_cot/7b_8gpu.yaml", [*settings, *changes])

    return load


def server(config, *, index=0, gpus=""):
    launch = EngineLaunch(
        model_dir=config.model.path,
        logs=Path("logs"),
        index=index,
        secret=None,
        shared=index < config.shared_replicas,
        shared_gpus=gpus,
    )
    spec = _server_of(config, launch)
    return spec.command(30000), spec.environment()


def value(command, flag):
    return command[command.index(flag) + 1]


def test_a_server_that_shares_gives_its_cache_back_and_its_watchdog_waits_for_the_learner(config_of, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # with it no memory is saved
    command, environment = server(config_of(*SHARING), gpus="3")
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    assert "--enable-memory-saver" in command
    assert value(command, "--max-total-tokens") == "200000"
    assert int(value(command, "--watchdog-timeout")) > 10**6


def test_a_server_on_gpus_of_its_own_is_as_ever(config_of, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    own, environment = server(config_of(*SHARING), index=4)
    assert (own, environment["CUDA_VISIBLE_DEVICES"]) == (server(config_of(SHARING[1]), index=4)[0], "6")
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("change", ["cluster.lease.cache=keep", "rollout.engine.device=cpu"])
def test_without_a_released_cache_a_server_that_shares_saves_no_memory(config_of, change):
    command, _ = server(config_of(*SHARING, "rollout.engine.tensor_parallel=1", change))
    assert "--enable-memory-saver" not in command
    assert "--watchdog-timeout" in command


def test_a_users_flag_goes_before_ours(config_of):
    command, _ = server(config_of(*SHARING, "rollout.engine.flags.watchdog-timeout=900"))
    assert value(command, "--watchdog-timeout") == "900"


def test_a_shared_gpu_needs_the_size_of_the_cache(config_of):
    with pytest.raises(ConfigError, match=r"^rollout\.kv_capacity=None: with cluster\.share=true .*; set the"):
        config_of("cluster.share=true", "rollout.kv_capacity=null")
    with pytest.raises(ConfigError, match=r"^cluster\.share=true: a replica has 8 GPUs, and the learner 4; raise"):
        config_of(*SHARING, "rollout.engine.tensor_parallel=8", replicas=1)
