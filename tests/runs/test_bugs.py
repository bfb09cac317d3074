"""A mistake of ours ends the run with one line that says where its traceback is: in the controller, in a thread
below a part, beside the user's own code. What all parts share is `tests/cluster/test_part.py`'s.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from laminar_lab.audit.queries import accounting
from laminar_lab.doctor import checks
from laminar_py.cli import main
from laminar_py.runtime.cluster.forked import SHARED
from tests.runs.runs import ALONE, REPO, TrainProcess, wait_until_gone
from tests.runs.test_emulated_run import CONFIG, SETTINGS

QUICKSTART = REPO / "configs/quickstart.yaml"
FROM_SCRATCH = ("warm_start=null", "model.from_scratch=true", "eval.sets={}")

PLANT = '''
import importlib.util, os, sys

MODULE, _, PLACE = os.environ["PLANTED"].partition(":")


class Planter:
    """Has the method fail once its module is imported, in whichever process."""

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def plant(module):
            load(module)
            kind, _, method = PLACE.partition(".")
            setattr(getattr(module, kind), method, fail)

        spec.loader.exec_module = plant
        return spec


def fail(*args, **kwargs):
    raise TypeError("planted")


sys.meta_path.insert(0, Planter())
'''


@pytest.mark.parametrize(
    ("place", "config", "settings"),
    [
        ("laminar_py.observe.stats:Stats.step_row", CONFIG, SETTINGS),
        ("laminar_py.engines.local.scheduler:Scheduler._dispatch", QUICKSTART, FROM_SCRATCH),
        ("laminar_py.reward.scorer:ScorerStorage.load_request", CONFIG, SETTINGS),
    ],
    ids=["controller", "engine", "scorer"],
)
def test_a_bug_ends_the_run_with_one_line_and_drops_nothing(tmp_path, monkeypatch, place, config, settings):
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PLANTED", place)
    monkeypatch.delenv(SHARED)  # the run has a fork server of its own, in which the bug is planted
    with TrainProcess(tmp_path, *settings, *ALONE, "repack.planner=none", config=config) as train:
        family = train.family()
        code, output = train.finish()
        assert wait_until_gone(family) == []
    assert code == 1, output
    (line,) = [line for line in output.splitlines() if line.startswith("laminar:")]
    found = re.search(r"unexpected, so probably a bug of laminar's: .*TypeError: planted; .* is in (\S+)$", line)
    assert found, line
    assert "planted" in Path(found[1]).read_text()
    assert "Traceback" not in output
    assert not accounting(train.run).train.dropped


def test_a_bug_in_a_command_without_a_run_is_one_line_too(tmp_path, monkeypatch, capsys):
    def fail(*arguments):
        raise TypeError("planted")

    monkeypatch.setattr(checks, "examine", fail)
    monkeypatch.setattr(sys, "argv", ["laminar", "doctor"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    (log,) = tmp_path.glob("laminar-*.log")
    assert line.endswith(f"TypeError: planted; the traceback is in {log}")
    assert "Traceback" in log.read_text()
