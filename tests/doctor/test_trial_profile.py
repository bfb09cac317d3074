"""The profile of `laminar doctor --try`: rates of a trial with few layers, for the whole model and its readers."""

import msgspec
import pytest
from typer.testing import CliRunner

from laminar_lab.calibration.profile import write_with_comment
from laminar_lab.doctor.trial_profile import Basis, SelfTest, TrialModel, profile_of
from laminar_lab.doctor.trial_rows import TriedRow, judged
from laminar_lab.emulation.settings import read_profile
from laminar_lab.gpus import gpu_named, gpu_of_device
from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.placements import learner_traffic
from laminar_lab.plan.pretend import placement_of, pretend, request_of
from laminar_lab.report.rates import HostRates, profiled_rates, slow_lines
from laminar_lab.step_time import LOAD_BYTES_PER_S, PUBLISH_BYTES_PER_S
from laminar_py.cli import app
from laminar_py.config import ConfigError
from laminar_py.config.loading import load_config
from tests.runs.runs import REPO

RECIPE = REPO / "experiments/math_long_cot/7b_8gpu.yaml"
_, WHOLE = model_named("7B")
FEW = msgspec.structs.replace(WHOLE, num_hidden_layers=2)
H100 = "NVIDIA H100 80GB HBM3"
RATES = {
    "GPU to host": 50e9,
    "all-reduce": 240e9,
    "reduce-scatter": 200e9,
    "engines start": 95.0,
    "learner step": 160_000.0,
    "publish": 10e9,
    "loads": 2e9,
}


def rows(**values):
    return [TriedRow(what=what, asked="", value=value) for what, value in (RATES | values).items()]


def self_test(*, shape=FEW, gpu=H100, num_bytes=None, values=None):
    model = TrialModel(shape=shape, num_bytes=num_bytes or 2 * shape.total, token_s=0.01)
    return SelfTest(rows=rows(**values or {}), gpu=gpu, model=model)


def recipe(*settings):
    return load_config(RECIPE, settings)


def by_name(fields):
    return {field.name: field for field in fields}


def test_times_of_few_layers_grow_with_bytes_and_flops_and_say_so():
    profile, fields = profile_of(recipe(), self_test())
    assert profile.engine.load_s == pytest.approx(2 * WHOLE.total / 2e9 / 2), "each of two GPUs loads half"
    assert profile.learner.optimizer_s == pytest.approx(50 * WHOLE.total / 3.35e12)
    assert profile.learner.publish_s == pytest.approx(2 * WHOLE.total / 10e9)
    assert profile.learner.train_tokens_per_s == pytest.approx(160_000 / 4 * FEW.active / WHOLE.active)
    assert (profile.learner.num_parameters, profile.learner.num_layers) == (WHOLE.total, 28)
    found = by_name(fields)
    assert found["engine.load_s"].basis is Basis.EXTRAPOLATED
    assert found["engine.load_s"].how == "loads, 2 of 28 layers, grown by bytes"
    assert found["engine.step_s"].how == "data sheet of H100"
    assert (profile.link_bytes_per_s, found["link_bytes_per_s"].basis) == (200e9, Basis.MEASURED)
    assert profile.relay_bytes_per_s is None, "one relay carries nothing to another process"


def test_times_of_the_whole_model_are_measured():
    profile, fields = profile_of(recipe(), self_test(shape=WHOLE, gpu=""))
    found = by_name(fields)
    assert profile.engine.step_s == 0.01
    assert {found[name].basis for name in ("engine.load_s", "engine.start_s", "learner.publish_s")} == {
        Basis.MEASURED
    }
    assert found["engine.prefill_tokens_per_s"].basis is Basis.EXTRAPOLATED


def test_a_version_of_few_bytes_says_nothing_about_loads():
    profile, fields = profile_of(recipe(), self_test(num_bytes=10**6))
    assert profile.engine.load_s == pytest.approx(10**6 * WHOLE.total / FEW.total / LOAD_BYTES_PER_S / 2)
    found = by_name(fields)
    assert found["engine.load_s"].basis is Basis.ASSUMED
    assert found["learner.publish_s"].how == "GPU to host: the trial's version is too small"
    _, fields = profile_of(recipe(), self_test(num_bytes=10**6, values={"GPU to host": None}))
    assert by_name(fields)["learner.publish_s"].how == f"{PUBLISH_BYTES_PER_S / 1e9:g} GB/s, by laminar plan"


def test_plan_and_simulate_read_the_profile_that_was_written(tmp_path):
    found, path = self_test(values={"versions to nodes": 0.6e9}), tmp_path / "profile.yaml"
    write_with_comment(profile_of(recipe(), found)[0], path, ["of a test"])
    profile = read_profile(path)
    config, times = pretend(recipe(), gpu_named("H100"), measured=profile)
    assert times == profile
    assert config.rollout.engine.simulation.restart_s == 95.0
    measured, assumed = (request_of(recipe(), gpu_named("H100"), measured=one) for one in (profile, None))
    place = placement_of(recipe())
    assert learner_traffic(measured, place).round_s > learner_traffic(assumed, place).round_s
    done = CliRunner().invoke(
        app, ["plan", "7B", "--gpus", "1x8xH100", "--seconds", "0", "--profile", str(path), "--json"]
    )
    assert done.exit_code == 0, done.exception


def test_a_run_that_is_slow_beside_the_profile_is_named_by_host_and_rate():
    expected = profiled_rates(profile_of(recipe(), self_test())[0], ranks=4)
    assert (expected.load, expected.publish) == (pytest.approx(2e9), pytest.approx(10e9))
    slow, sound = HostRates(host="relay-1", load=0.5e9, publish=9e9), HostRates(host="relay-0", load=1.9e9)
    (line,) = slow_lines([sound, slow], expected)
    assert line.startswith("slow: relay-1, load: 0.5 GB/s, where the profile says 2;")


def test_a_failed_trial_has_no_profile_and_imagined_nodes_have_none(tmp_path):
    failed = SelfTest(rows=[judged("learner start", "", "no", failed=True)])
    assert failed.failed
    with pytest.raises(ConfigError, match="no formula knows its size"):
        profile_of(recipe(), failed)
    words = ["doctor", str(RECIPE), "--out", str(tmp_path / "p.yaml")]
    done = CliRunner().invoke(app, words)
    assert str(done.exception).endswith("is for --try; add it, or leave this out")
    done = CliRunner().invoke(app, [*words, "--try", "--pretend", "1x8xH100"])
    assert str(done.exception).endswith("imagined nodes have no rates; leave out --out or --pretend")


def test_a_driver_s_name_finds_its_gpu_in_the_catalog():
    assert gpu_of_device(H100) is gpu_named("H100")
    assert gpu_of_device("NVIDIA GeForce RTX 3090") is None
