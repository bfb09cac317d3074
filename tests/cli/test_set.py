"""`laminar set` and `laminar scale`: settings that they leave for the controller, and refusals."""

import pytest
from typer.testing import CliRunner

from laminar_py.cli import app
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.ledger.requests import take_wanted
from laminar_py.ledger.run_folder import new_run
from tests.runs.runs import REPO


@pytest.fixture
def run(tmp_path):
    settings = [f"runs={tmp_path}", "rollout.replicas=2", "rollout.prompts_per_step=64", "rollout.group_size=4"]
    run = new_run(load_config(REPO / "configs/quickstart.yaml", [*settings, "rollout.batch_per_replica=128"]))
    run.lock()
    return run


def call(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done


def scale(folder, replicas):
    return call("scale", folder, replicas)


def test_the_controller_finds_the_wanted_settings(run):
    assert "asked for rollout.replicas=6" in scale(run.path, 6).output
    call("set", run.path, "staleness.max_staleness=2", "learner.publish_every=2")
    call("set", run.path, "buffer.capacity=9000")
    wanted = [["rollout.replicas=6"], ["staleness.max_staleness=2", "learner.publish_every=2"]]
    assert take_wanted(run.path, 0) == [*wanted, ["buffer.capacity=9000"]]


def test_settings_that_only_hold_together_are_left_in_any_order(run):
    call("set", run.path, "learner.publish_every=6", "staleness.max_staleness=8")
    assert take_wanted(run.path, 0) == [["learner.publish_every=6", "staleness.max_staleness=8"]]


def test_a_setting_that_a_running_run_keeps_is_refused_with_the_way_to_change_it(run):
    with pytest.raises(ConfigError, match=r"stop the run, and resume it with learner\.lr=1e-4"):
        call("set", run.path, "learner.lr=1e-4")
    assert take_wanted(run.path, 0) == []


@pytest.mark.parametrize(
    ("replicas", "line"),
    [
        (0, "rollout.replicas=0: input should be greater than or equal to 1"),
        (1, "rollout.replicas=1: a learner step takes 256 new trajectories"),
    ],
)
def test_a_number_that_the_config_refuses_is_not_left(run, replicas, line):
    with pytest.raises(ConfigError, match=line):
        scale(run.path, replicas)
    assert take_wanted(run.path, 0) == []


def test_a_run_without_a_controller_and_an_evaluation_are_refused(run, tmp_path):
    run.unlock()
    with pytest.raises(ConfigError, match=r"no controller runs it; .* --resume rollout\.replicas=6"):
        scale(run.path, 6)
    with pytest.raises(ConfigError, match=r"--resume staleness\.max_staleness=2"):
        call("set", run.path, "staleness.max_staleness=2")
    run.source.write_text("{}")
    with pytest.raises(ConfigError, match="an evaluation, whose settings cannot change"):
        scale(run.path, 6)
    with pytest.raises(ConfigError, match=r"no config\.yaml in it"):
        scale(tmp_path, 2)


def test_what_is_no_number_ends_with_exit_code_2(run):
    assert scale(run.path, "many").exit_code == 2
