"""Planted bottlenecks without a run: what is set against each, and the figures that come of it."""

from dataclasses import replace

import pytest

from experiments.walls.run import CONFIG, HERE, Trial, read_plant, rows
from laminar_lab.advice import Remedy, remedies
from laminar_lab.report.diagnosis import Bottleneck
from laminar_py.config.loading import load_config
from tests.report.test_diagnosis import FULL, mean_step_of

PLANTS = [read_plant(path) for path in sorted(HERE.glob("*.yaml"))]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_the_first_remedy_against_a_planted_wall_can_be_set_as_it_stands(plant):
    step = replace(mean_step_of(reward_s=9.8), crowded_share=0.9, microbatches=40.0)
    first = remedies(plant.bottleneck, load_config(CONFIG, [*plant.settings]), step)[0]
    assert first.key == plant.remedy
    before, after = (load_config(CONFIG, [*plant.settings, *more]) for more in ((), (f"{first.key}={first.new}",)))
    assert before != after


def test_figures_are_means_over_seeds_and_the_error_is_that_of_the_predicted_step():
    before = replace(mean_step_of(measured_s=4.0), use=replace(FULL, cpu=0.5))
    (plant,) = (one for one in PLANTS if one.bottleneck is Bottleneck.REWARD)
    trials = [
        Trial(
            named=named,
            change=Remedy("reward.workers", f"1 -> {workers}", ""),
            before=before,
            predicted_s=1.0,
            seen_s=seen_s,
        )
        for named, workers, seen_s in ((True, 5, 1.5), (False, 8, 1.0))
    ]
    found = rows(plant, trials)
    assert found[0].conditions == "reward: reward.workers 1 -> 5/8, 2 seeds"
    assert [row.value for row in found] == pytest.approx([0.5, 0.5, 4.0, 4.0, 3.2, -0.2])
