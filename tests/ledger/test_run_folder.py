"""Folders of a run: its owner's alone, or refused in one line."""

import stat

import pytest

from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import RunFolder, new_run
from tests.runs.runs import REPO


def config_of(folder):
    return load_config(REPO / "configs/quickstart.yaml", [f"runs={folder}"])


def test_a_run_folder_is_its_owners_alone(tmp_path):
    run = new_run(config_of(tmp_path / "runs"))
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^runs=.*/file/runs: cannot create a run there \(.*Not a directory"):
        new_run(config_of(tmp_path / "file/runs"))
    with pytest.raises(ConfigError, match=r"^run=.*/file: cannot be written \(Not a directory\)"):
        RunFolder(tmp_path / "file").lock()
