"""Experiment files of the tests, and stand-ins for `laminar train` that are real processes."""

import subprocess
import sys
from pathlib import Path

import yaml

from laminar_lab.launcher.experiment import read_experiment
from tests.runs.runs import ALONE, REPO, SMALL

LAUNCH = [sys.executable, "-P", "-m", "laminar_py.cli", "launch"]
BASE = REPO / "configs/quickstart.yaml"

HEAD = """
import os, signal, sys, time
from pathlib import Path
changes = dict(one.split("=", 1) for one in sys.argv[2:] if "=" in one)
"""


def write_experiment(folder, **settings):
    """The file of an experiment on the quickstart."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump({"name": "e", "base": str(BASE), **settings}, sort_keys=False))
    return file


def make_experiment(folder, **settings):
    return read_experiment(write_experiment(folder, **settings))


def small_settings(folder, **more):
    """Settings of very small whole runs of the quickstart."""
    pairs = (setting.partition("=") for setting in (*SMALL, *ALONE))
    settings = {key: yaml.safe_load(value) for key, _, value in pairs}
    return settings | {"warm_start.cache": str(folder / "warm"), **more}


def start_launcher(file):
    """`laminar launch` of a file; its output is in `launch.out` beside it."""
    with (file.parent / "launch.out").open("ab") as out:
        return subprocess.Popen([*LAUNCH, str(file)], cwd=REPO, stdout=out, stderr=subprocess.STDOUT)


def program(folder, text):
    """Command of a program that is called as `laminar train` is: with a config and overrides as its arguments."""
    path = Path(folder) / "train.py"
    path.write_text(HEAD + text)
    return [sys.executable, str(path)]
