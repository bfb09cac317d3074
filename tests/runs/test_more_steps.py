"""A run that has ended and is given more steps: its versions are gone, and replicas are up before the learner."""

import os

import pytest

from laminar_lab.audit.queries import Filters, listing
from laminar_py.records.trajectory import DropReason, Kind, Status
from laminar_py.runtime.cluster.forked import SHARED
from tests.runs.runs import TrainProcess, assert_laws
from tests.runs.test_emulated_run import CONFIG, SETTINGS

LATE_LEARNER = """
import importlib.util, os, sys, time


class Late:
    def find_spec(self, name, path, target=None):
        if name != "laminar_py.runtime.workers.processes.learner":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            make = module.LearnerActor.load

            def load(part, *given):
                while not os.path.exists(os.environ["LEARNER_MAY_START"]):
                    time.sleep(0.05)
                return make(part, *given)

            module.LearnerActor.load = load

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Late())
"""


@pytest.fixture
def late_learner(tmp_path, monkeypatch):
    """File without which the learners of runs do not start."""
    (tmp_path / "sitecustomize.py").write_text(LATE_LEARNER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv(SHARED)  # the run has a fork server of its own, which reads that file
    monkeypatch.setenv("LEARNER_MAY_START", str(tmp_path / "may-start"))
    return tmp_path / "may-start"


def lost(run):
    """Trajectories of which the version is lost."""
    dropped = listing(run, Filters(status=Status.DROPPED, kind=Kind.TRAIN))
    return {row.id for row in dropped if row.drop_reason is DropReason.VERSION_LOST}


@pytest.mark.slow
def test_replicas_that_are_up_before_the_learner_wait_for_its_weights(tmp_path, late_learner):
    late_learner.touch()
    with TrainProcess(tmp_path, *SETTINGS, "steps=2", config=CONFIG) as train:
        train.end_with(0)
    late_learner.unlink()
    before = lost(train.run)
    with TrainProcess(tmp_path, "steps=3", resume=True, small=(), config=CONFIG) as train:
        train.wait_until(lambda: lost(train.run) > before)
        late_learner.touch()
        train.end_with(0)
    assert_laws(train.run)
