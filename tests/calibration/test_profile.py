"""A profile: what is written is read, what cannot be measured is one line; the command measures a small model."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from laminar_lab.bench.workplace import write_model
from laminar_lab.calibration.learner import choose_steps
from laminar_lab.calibration.profile import Calibration, calibrate, write_profile
from laminar_lab.emulation.settings import read_profile
from laminar_lab.step_time import TimedShape, fit
from laminar_py.cli import app
from laminar_py.config.loading import load_config, parse_config
from laminar_py.config.section import ConfigError
from tests.bench.test_benchmarks import TINY

PROFILE = Path("configs/emulation/h100_7b_tp1.yaml")
GOOD = fit([TimedShape("one", (1.0,), 2.0), TimedShape("two", (2.0,), 4.0)])
BAD = fit([TimedShape("one", (1.0,), 2.0), TimedShape("two", (1.0,), 4.0)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny", TINY)


def config_of(folder, **changes):
    return parse_config(
        {
            "name": "measured",
            "steps": 2,
            "model": {"path": str(folder), "from_scratch": True},
            "data": {"train": "none.jsonl"},
            "rollout": {"max_batch": 8, "max_len": 128, "sampling": {"max_new_tokens": 96}},
            "packer": {"max_tokens": 128},
            "reward": {"use": [{"kind": "exact", "pattern": "(.*)"}]},
            **changes,
        }
    )


def test_a_profile_that_is_written_is_the_one_that_is_read(tmp_path):
    profile = read_profile(PROFILE).model_copy(update={"relay_bytes_per_s": 1.2e9})
    write_profile(Calibration(profile, GOOD, BAD, 10**9), tmp_path / "out.yaml", measured="a test")
    assert read_profile(tmp_path / "out.yaml") == profile
    comment = [line for line in (tmp_path / "out.yaml").read_text().splitlines() if line.startswith("#")]
    assert "a test" in comment[0]
    assert any("Learner steps: 2 sizes, error of the fit 30.0%, at most 40.0%" in line for line in comment)


def test_a_fit_that_is_bad_is_warned_of():
    (warning,) = Calibration(read_profile(PROFILE), GOOD, BAD, 10**9).warnings
    assert warning.startswith("learner: the fit is off by 30% on average")


def test_steps_keep_to_their_tokens_and_to_the_longest_sequence():
    for one in choose_steps(max_len=448, max_tokens=4096):
        tokens = int(one.name.split()[0])
        assert 0.5 * tokens < sum(one.lengths) <= tokens
        assert max(one.lengths) <= 448


def test_the_command_measures_a_model_and_writes_what_a_simulation_reads(model, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"name: tiny\nsteps: 4\nmodel: {{path: {model}, from_scratch: true}}\ndata: {{train: none.jsonl}}\n"
        "rollout: {max_batch: 8, max_len: 128, sampling: {max_new_tokens: 96}}\npacker: {max_tokens: 128}\n"
        "reward: {use: [{kind: exact, pattern: '(.*)'}]}\n"
    )
    done = CliRunner().invoke(app, ["calibrate", str(config), "--out", str(tmp_path / "p.yaml"), "--repeats", "1"])
    assert done.exit_code == 0, done.output
    profile = read_profile(tmp_path / "p.yaml")
    assert profile.learner.hidden_size == TINY.hidden_size
    assert profile.engine.step_s > 0
    assert profile.learner.train_tokens_per_s > 0
    assert 0 < profile.learner.publish_s < 1
    assert 0 < profile.relay_bytes_per_s < 1e10
    assert "verified" in done.stdout
    assert "8 x" in done.stdout


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"learner": {"world_size": 2}}, "learner.world_size=2: one device is measured"),
        ({"model": {"path": "nowhere"}}, "model.path=nowhere"),
    ],
)
def test_what_is_not_measured_is_one_line(model, changes, line):
    with pytest.raises(ConfigError, match=line):
        calibrate(config_of(model, **changes), repeats=1, log=lambda line: None)


def test_a_config_of_an_emulation_has_nothing_to_measure():
    emulated = load_config(Path("configs/emulation/repack.yaml"), [])
    with pytest.raises(
        ConfigError, match=r"rollout\.engine\.profile=.*: emulated engines have their times from the profile"
    ):
        calibrate(emulated, repeats=1, log=lambda line: None)


def test_a_profile_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    done = CliRunner().invoke(
        app, ["calibrate", "configs/quickstart.yaml", "--out", str(tmp_path / "no" / "p.yaml")]
    )
    assert isinstance(done.exception, ConfigError)
