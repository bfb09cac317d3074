"""Backends: light until they are opened, and what their sections tell of an engine."""

import subprocess
import sys

import pytest

from laminar_py.cluster.placement import Needs, learner_device
from laminar_py.config.cluster import Device
from laminar_py.config.loading import load_config, parse_config
from laminar_py.engines.registry import BACKENDS, secret_of
from tests.runs.runs import REPO

MINIMAL = {"name": "t", "steps": 3, "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
SERVERS = ["http://10.0.0.5:30000", "http://10.0.0.6:30000"]


def config_of(**engine):
    return parse_config({**MINIMAL, "rollout": {"engine": engine, "replicas": 2}})


def test_the_controller_gets_every_backend_without_torch_and_without_an_http_client():
    code = (
        "import sys; from laminar_py.engines.registry import BACKENDS\n"
        f"[BACKENDS.get(name) for name in {BACKENDS.names()}]\n"
        "assert not {'torch', 'aiohttp'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("engine", "replica_gpus", "device"),
    [
        ({}, 0, Device.CPU),
        ({"kind": "sglang", "tensor_parallel": 2}, 2, Device.CUDA),
        ({"kind": "sglang", "device": "cpu"}, 0, Device.CPU),
        ({"kind": "sglang", "urls": SERVERS}, 0, Device.CPU),  # GPUs of servers that run are nobody's to give
    ],
)
def test_a_section_says_which_gpus_its_engines_need(engine, replica_gpus, device):
    config = config_of(**engine)
    needs = Needs.of(config)
    assert (needs.replica_gpus, learner_device(config)) == (replica_gpus, device)
    assert needs.hosts == (("10.0.0.5", "10.0.0.6") if "urls" in engine else ())


def test_only_the_secret_of_the_backend_leaves_the_controllers_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", "secret")
    assert secret_of(config_of(kind="sglang")) == "secret"
    assert secret_of(config_of()) is None
    monkeypatch.setenv("SGLANG_API_KEY", "")
    assert secret_of(config_of(kind="sglang")) is None


def test_an_emulated_engine_does_not_yield_its_cpu_and_others_on_cpus_do():
    emulated = load_config(REPO / "configs/emulation/repack.yaml", [])
    assert (emulated.rollout.engine.kind, emulated.rollout.engine.yields_cpus) == ("emulated", False)
    assert config_of().rollout.engine.yields_cpus
    assert config_of(kind="sglang", device="cpu").rollout.engine.yields_cpus
    assert not config_of(kind="sglang").rollout.engine.yields_cpus


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_configs_are_read(path):
    assert load_config(path, []).name
