"""Whole runs whose learner and replica 0 share a GPU that only the cluster's accounting knows.

The engines and the learner are emulated, by a backend of the test's own whose engines count as engines on GPUs.
"""

import os
from pathlib import Path

import pytest

from tests.runs.fake_cluster import FakeCluster
from tests.runs.runs import TrainProcess, assert_laws
from tests.runs.test_emulated_run import CONFIG, SETTINGS
from tests.runs.test_train import starts_of

BACKEND = """
import os
from dataclasses import replace
from pathlib import Path

from laminar_lab.emulation.backend import EMULATED, open_engine
from laminar_lab.emulation.settings import EmulationConfig


class DealtConfig(EmulationConfig):
    gpus = property(lambda self: 1)


async def open_dealt(config, launch):
    with (Path(__file__).parent / f"replica-{launch.index}").open("a") as file:
        file.write(f"{launch.shared_gpus}|{os.environ['CUDA_VISIBLE_DEVICES']}\\n")
    return await open_engine(config, launch)


DEALT = replace(EMULATED, settings=DealtConfig, open=open_dealt)
"""
ENTRY = "[laminar_py.backends]\ndealt = dealt:DEALT\n"
SHARED = (
    "rollout.engine.kind=dealt",
    "rollout.engine.profile=configs/emulation/h100_7b.yaml",
    "rollout.engine.compression=20",
    *SETTINGS,
    "rollout.replicas=2",
    "rollout.prompts_per_step=6",
    "relay.nodes=1",
    "cluster.share=true",
    "learner.checkpoint_every=1",
    "steps=6",
)


@pytest.fixture
def dealt(tmp_path, monkeypatch):
    """The folder of the installed backend, where a line for each engine tells its GPUs."""
    folder = tmp_path / "package"
    info = folder / "dealt-1.dist-info"
    info.mkdir(parents=True)
    (folder / "dealt.py").write_text(BACKEND)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dealt\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return folder


def told(folder: Path, replica: int) -> list[list[str]]:
    """Of each engine of a replica: the GPUs that it shares, and those that its process sees."""
    return [line.split("|") for line in (folder / f"replica-{replica}").read_text().splitlines()]


def check(run: Path) -> None:
    assert_laws(run)


def test_a_replica_follows_the_gpu_of_its_learner_rank_which_restarts_on_another(tmp_path, dealt, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    with TrainProcess(tmp_path, *SHARED, config=CONFIG) as train:
        train.wait_for_step(2)
        os.kill(starts_of(train.run)["learner-0"][-1], 9)
        train.end_with(0)
    assert told(dealt, 0) == [["GPU-a", ""], ["GPU-c", ""]], "GPU-c was free when the learner restarted"
    assert told(dealt, 1) == [["", "GPU-b"]]
    check(train.run)


@pytest.mark.slow
def test_on_ray_a_replica_gets_the_gpu_of_its_learner_rank(tmp_path, dealt):
    with (
        FakeCluster(2) as cluster,
        TrainProcess(tmp_path, *SHARED, f"cluster.address={cluster.address}", config=CONFIG) as train,
    ):
        train.end_with(0)
    ((shared, seen),), ((none, own),) = told(dealt, 0), told(dealt, 1)
    assert (seen, none) == ("", "")
    assert {shared, own} == {"0", "1"}
    check(train.run)
