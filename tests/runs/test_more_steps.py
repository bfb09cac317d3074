"""A run that has ended and is given more steps: its versions are gone, and replicas are up before the learner."""

import os

from laminar_py.audit.queries import Filters, accounting, listing
from laminar_py.audit.verify import verify
from laminar_py.records.trajectory import DropReason, Kind, Status
from tests.runs.runs import TrainProcess, forget_versions
from tests.runs.test_emulated_run import CONFIG, SETTINGS

SLOW_LEARNER = """
import sys, time


class Slow:
    def find_spec(self, name, path, target=None):
        if name == "laminar_py.workers.processes.learner_part":
            sys.meta_path.remove(self)
            time.sleep(10)  # as long as a model of some size takes to be loaded, beside replicas of this one


sys.meta_path.insert(0, Slow())
"""


def test_replicas_that_are_up_before_the_learner_wait_for_its_weights(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SLOW_LEARNER)
    with TrainProcess(tmp_path, *SETTINGS, "steps=2", config=CONFIG) as train:
        code, output = train.finish()
    assert code == 0, output
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with TrainProcess(tmp_path, "steps=3", resume=True, small=(), config=CONFIG) as train:
        code, output = train.finish()
    forget_versions(train.run)
    assert code == 0, output
    dropped = list(listing(train.run, Filters(status=Status.DROPPED, kind=Kind.TRAIN)))
    assert DropReason.VERSION_LOST in {row.drop_reason for row in dropped}, "what had begun was of those versions"
    assert verify(train.run) == []
    assert accounting(train.run).balanced
