"""Backends: light until they are opened, and what their sections tell of an engine."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from laminar_py.config.cluster import Device
from laminar_py.config.engine import BACKENDS, Backend, EngineConfig
from laminar_py.config.loading import load_config, parse_config
from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode
from laminar_py.runtime.cluster.placement import Needs
from laminar_py.runtime.preflight.inputs import check_engine
from laminar_py.runtime.preflight.node_checks import NodeReport, inspect_node
from laminar_py.runtime.workers.processes.replica import _unwrapping_bugs
from tests.runs.runs import REPO

MINIMAL = {
    "reward": {"use": [{"kind": "exact", "pattern": "(.+)"}]},
    "name": "t",
    "steps": 3,
    "model": {"path": "m"},
    "data": {"train": "t.jsonl"},
}
SERVERS = ["http://10.0.0.5:30000", "http://10.0.0.6:30000"]


def config_of(**engine):
    return parse_config({**MINIMAL, "rollout": {"engine": engine, "replicas": 2}})


def test_the_controller_gets_every_backend_without_torch_and_without_an_http_client():
    code = (
        "import sys; from laminar_py.config.engine import BACKENDS\n"
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
    needs = Needs.from_config(config)
    assert (needs.replica_gpus, config.learner_device) == (replica_gpus, device)
    assert needs.hosts == (("10.0.0.5", "10.0.0.6") if "urls" in engine else ())


def test_only_the_secret_of_the_backend_leaves_the_controllers_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", "secret")
    assert config_of(kind="sglang").rollout.engine.secret() == "secret"
    assert config_of().rollout.engine.secret() is None
    monkeypatch.setenv("SGLANG_API_KEY", "")
    assert config_of(kind="sglang").rollout.engine.secret() is None


def test_an_emulated_engine_does_not_yield_its_cpu_and_others_on_cpus_do():
    emulated = load_config(REPO / "configs/emulation/repack.yaml", [])
    assert (emulated.rollout.engine.kind, emulated.rollout.engine.yields_cpus) == ("emulated", False)
    assert config_of().rollout.engine.yields_cpus
    assert config_of(kind="sglang", device="cpu").rollout.engine.yields_cpus
    assert not config_of(kind="sglang").rollout.engine.yields_cpus


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_configs_are_read(path):
    assert load_config(path, []).name


@pytest.mark.parametrize(
    ("engine", "setting"),
    [
        ({}, "rollout.engine"),
        ({"kind": "sglang"}, "rollout.engine.tensor_parallel"),
        ({"kind": "sglang", "urls": SERVERS}, "rollout.engine.urls"),
    ],
)
def test_a_section_names_the_setting_that_places_its_engines(engine, setting):
    assert Needs.from_config(config_of(**engine)).placed_by == setting


def planted(*arguments):
    raise ValueError("planted")


async def planted_open(config, launch):
    planted()


async def use(settings):
    """What a run asks of a backend."""
    config = parse_config(settings)
    check_engine(config)
    if fault := decode(NodeReport, inspect_node("", config.model_dump_json(), "replica")).fault:
        raise ConfigError(fault)
    with _unwrapping_bugs(config):
        await BACKENDS.get(config.rollout.engine.kind).open(config, None)


@pytest.mark.parametrize("place", ["check", "check_start", "check_node", "open"])
async def test_a_mistake_in_an_installed_backend_is_told_with_its_name(monkeypatch, tmp_path, place):
    backend = {"settings": EngineConfig, "open": planted_open} | ({place: planted} if place != "open" else {})
    monkeypatch.setitem(globals(), "DICE", Backend(**backend))
    point = EntryPoint("dice", f"{__name__}:DICE", "laminar_py.backends")
    monkeypatch.setitem(vars(BACKENDS), "_announced", [point])
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    named = r"^rollout\.engine\.kind=dice: .*:DICE of .* raised ValueError: planted; fix"
    with pytest.raises(ConfigError, match=named):
        await use({**MINIMAL, "model": {"path": str(tmp_path)}, "rollout": {"engine": {"kind": "dice"}}})
