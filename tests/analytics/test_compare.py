"""Runs side by side, on curves made by hand."""

from types import SimpleNamespace

import pytest

from laminar_py.config.loading import load_config
from laminar_py.observe.compare import compare
from laminar_py.observe.quality import Point, Quality, count_devices
from tests.runs.runs import REPO

QUICKSTART = load_config(REPO / "configs/quickstart.yaml", [])


def make_report(rl_s, devices, *accuracy, rewards=(), config=QUICKSTART, **sets):
    """A report with a curve: pairs of seconds and value; of further sets too."""

    def curve(pairs):
        return tuple(
            Point(step=step, rl_s=at, tokens=round(100 * at), device_hours=at * devices / 3600, value=value)
            for step, (at, value) in enumerate(pairs)
        )

    quality = Quality(
        devices=devices,
        device="process",
        measure="accuracy",
        evaluated=curve(accuracy),
        by_set={"first": curve(accuracy)} | {name: curve(pairs) for name, pairs in sets.items()},
        reward=curve(rewards),
    )
    return SimpleNamespace(rl_s=rl_s, quality=quality, snapshot=SimpleNamespace(config=config))


def test_runs_that_differ_in_their_seeds_stand_together_with_every_set_at_equal_device_hours():
    def made(rl_s, *settings, hard):
        config = load_config(REPO / "configs/quickstart.yaml", ["tracking.kinds=[]", *settings])
        return make_report(rl_s, 1, (0.0, 0.1), (rl_s, 0.9), config=config, hard=hard)

    other, *seeds = (
        made(7200.0, "learner.lr=1e-5", "seed=1", hard=[(3600.0, 0.8)]),
        made(3600.0, "seed=1", "name=a", "warm_start.cache=one", hard=[(0.0, 0.2), (3600.0, 0.4)]),
        made(7200.0, "seed=2", "name=b", "warm_start.cache=two", hard=[(0.0, 0.2), (3600.0, 0.6), (7200.0, 0.9)]),
    )
    found = compare([seeds[0], other, seeds[1]])
    assert found.device_hours == 1.0
    assert [group.runs for group in found.groups] == [(0, 2), (1,)]
    assert found.groups[0].at_equal == {"first": (0.9, 0.1), "hard": (0.4, 0.6)}
    assert found.groups[1].at_equal == {"first": (0.1,), "hard": (0.8,)}


def test_levels_lie_between_the_best_start_and_the_worst_end_and_count_when_first_reached():
    slow = make_report(100.0, 4, (0.0, 0.2), (50.0, 0.5), (100.0, 0.6))
    fast = make_report(80.0, 4, (0.0, 0.1), (20.0, 0.6), (80.0, 0.9))
    found = compare([slow, fast])
    assert found.measure == "accuracy"
    assert [reached.level for reached in found.reached] == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert [[point.rl_s for point in reached.points] for reached in found.reached] == [
        [50.0, 20.0],
        [50.0, 20.0],
        [50.0, 20.0],
        [100.0, 20.0],
    ]


def test_quality_is_compared_at_the_device_hours_that_all_have_had():
    small = make_report(3600.0, 2, (0.0, 0.0), (3600.0, 0.5))
    large = make_report(1800.0, 8, (0.0, 0.0), (450.0, 0.3), (900.0, 0.6), (1800.0, 0.9))
    found = compare([small, large])
    assert found.device_hours == 2.0
    assert [point.value for point in found.at_equal] == [0.5, 0.6]


def test_beside_accuracy_stands_the_reward_in_training_which_is_known_at_each_step():
    rare = make_report(100.0, 1, (0.0, 0.2), (100.0, 0.9), rewards=((10.0, 0.3), (50.0, 0.7), (100.0, 0.9)))
    often = make_report(50.0, 1, (0.0, 0.2), (50.0, 0.6), rewards=((10.0, 0.3), (50.0, 0.6)))
    found = compare([rare, often])
    assert [(point.rl_s, point.value) for point in found.at_equal] == [(0.0, 0.2), (50.0, 0.6)]
    assert [point.value for point in found.reward_at_equal] == [0.7, 0.6]


def test_without_two_evaluations_of_each_the_reward_is_compared():
    known = make_report(10.0, 1, (0.0, 0.2), (9.0, 0.8), rewards=((1.0, 0.1), (9.0, 0.7)))
    other = make_report(10.0, 1, (0.0, 0.2), rewards=((1.0, 0.1), (9.0, 0.5)))
    found = compare([known, other])
    assert found.measure == "reward"
    assert found.reached[-1].level == 0.5


def test_a_run_that_never_rises_above_the_others_start_has_no_common_level():
    high, low = (make_report(9.0, 1, (0.0, start), (9.0, start + 0.1)) for start in (0.5, 0.1))
    assert compare([high, low]).reached == ()


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ("configs/quickstart", [], (3, "process")),
        ("configs/emulation/repack", ["emulation.learner_devices=4", "rollout.replicas=3"], (7, "emulated GPU")),
        ("experiments/math_long_cot/7b_8gpu", ["rollout.replicas=5", "learner.world_size=3"], (8, "GPU")),
    ],
)
def test_devices_are_those_of_replicas_and_learner(config, settings, expected):
    assert count_devices(load_config(REPO / f"{config}.yaml", settings)) == expected
