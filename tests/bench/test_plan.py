"""The planner's benchmark: what a run tells, and how predicted is laid beside measured."""

import subprocess
import sys
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from laminar_lab.bench.plan import quickstart
from laminar_lab.bench.plan.facts import (
    LEARNER,
    REPLICA,
    CpuLog,
    CpuSpent,
    RunFacts,
    cores_left,
    modelled_s,
    sigma_of,
    watching_cpu,
)
from laminar_lab.bench.plan.quickstart import Compared
from laminar_lab.bench.plan.regret import MOST_PLACEMENTS, draw_case
from laminar_lab.emulation.settings import LearnerTimes, read_profile
from laminar_lab.plan.placements import placements
from laminar_lab.simulate.run import check
from laminar_py.config.loading import load_config
from tests.analytics.builders import make_fleet_row
from tests.bench.figures import figures
from tests.runs.runs import REPO

FACTS = RunFacts(
    median_tokens=33,
    sigma=0.9,
    prompt_share=0.9,
    prompt_tokens=7,
    solved=0.4,
    reward_s=0.05,
    publish_s=0.02,
    handover_s=0.04,
    trajectory_cpu_s=0.001,
    learner_slowdown=1.2,
    replica_cpu_s=5e-5,
    cores=1.9,
)


def test_cpu_time_between_two_moments_is_divided_by_what_processes_are():
    before = {(REPLICA, 7): 9.0, (LEARNER, 8): 1.0, ("", 9): 2.0}
    after = {(REPLICA, 7): 9.5, (REPLICA, 70): 3.0, (LEARNER, 8): 5.0, ("", 9): 2.25}
    log = CpuLog([100.0, 110.0], [before, after])
    assert log.spent(99.5, 109.5) == CpuSpent(learner_s=4.0, replicas_s=3.5, rest_s=0.25)


def test_processes_below_this_one_are_seen():
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    with watching_cpu() as log, subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as child:
        child.stdout.readline()
        num_looks = len(log.at_s)
        while len(log.at_s) < num_looks + 2:
            time.sleep(0.05)
        child.communicate(b"\n")
    assert max(sum(used.values()) for used in log.used_s) >= 0.4


def test_the_sigma_of_lengths_that_engines_drew_is_found_again():
    drawn = np.clip(50 * np.exp(0.8 * np.random.default_rng(1).standard_normal(100_000)), 16, 344)
    assert sigma_of(drawn.mean(), middle=50, cap=344) == pytest.approx(0.8, abs=0.02)


def test_steps_take_what_the_profile_says_of_their_sequences():
    times = LearnerTimes(
        train_tokens_per_s=1000, num_parameters=10**9, hidden_size=1, num_layers=1, optimizer_s=0.1
    )
    assert modelled_s([500] * 4, times, steps=2) == pytest.approx(2 * 0.1 + 2.0, abs=1e-3)


def test_cores_that_others_keep_busy_are_not_a_runs():
    rows = [
        msgspec.structs.replace(make_fleet_row(float(second), [1], [0.5]), cores=2, cpu_use=use, own_cpu_use=own)
        for second, (use, own) in enumerate([(1.0, 0.5), (0.5, 0.5)])
    ]
    assert cores_left(rows) == pytest.approx(2 * 0.75)


def test_errors_are_of_medians_and_a_setting_that_scatters_may_be_off_by_twice_its_spread():
    close = Compared("sync", [90.0, 110.0, 100.0], [100.0, 100.0, 100.0])
    assert close.error == 0.0
    scattered, off = [80.0, 100.0, 110.0], [100.0, 100.0, 100.0]
    found = [close, Compared("one_step", [140.0] * 3, scattered), Compared("stale_0", [140.0] * 3, off)]
    rows = figures("plan", "quickstart", quickstart.table(found, [3.0]))
    assert rows["plan_error_median"] == pytest.approx(0.4)
    assert rows["plan_within"] == 2


def test_each_setting_is_one_that_runs_and_one_that_is_simulated():
    emulated = [
        "rollout.engine.kind=emulated",
        "rollout.engine.profile=configs/emulation/h100_7b.yaml",
        "warm_start=null",
        *FACTS.settings,
    ]
    for one in quickstart.SETTINGS:
        load_config(quickstart.CONFIG, [*quickstart.BASE, *one.settings])
        check(load_config(quickstart.CONFIG, [*quickstart.BASE, *emulated, *(one.simulated or one.settings)]))
    names = [one.settings for one in quickstart.SETTINGS]
    assert () not in names, "the base setting is what is calibrated with"


@pytest.mark.slow
def test_a_base_is_explained_with_what_its_replicas_took_for_a_token(monkeypatch):
    monkeypatch.setattr(quickstart, "SEEDS", 1)
    profile = read_profile(REPO / "configs/emulation/h100_7b.yaml")
    known = quickstart.KnownBase(FACTS, profile)
    alone = known.predict(quickstart.BASE_SETTING)
    took = alone.engine_s_per_token
    slower = replace(known, facts=replace(FACTS, replica_cpu_s=2 * took)).fitted().fitted()
    beside = slower.predict(quickstart.BASE_SETTING)
    assert beside.engine_s_per_token == pytest.approx(2 * took, rel=0.05)
    assert beside.trained_tokens_per_s < alone.trained_tokens_per_s


def test_cases_of_regret_are_of_64_gpus_at_most_and_the_same_every_time():
    for number in range(10):
        request = draw_case(number)
        assert request.fleet.gpus <= 64
        assert 0 < len(placements(request)) <= MOST_PLACEMENTS
        assert request == draw_case(number)
