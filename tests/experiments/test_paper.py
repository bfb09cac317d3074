"""The comparison with the paper: its parameters, its cells and its table, without the runs."""

import sys
from dataclasses import replace

import pytest
import yaml

from experiments.paper import baselines

sys.modules.setdefault("baselines", baselines)  # as the scripts find them, beside themselves

from experiments.paper import cells  # noqa: E402
from experiments.paper.cells import (  # noqa: E402
    Arm,
    Cell,
    CellFigures,
    config_of,
    measure,
    profile_of,
    read_parameters,
)

sys.modules.setdefault("cells", cells)

from experiments.paper.run import Comparison  # noqa: E402

CELL = Cell(arm=Arm.ASYNC, size="7b", gpus=64, tp=1, share=0.5, mfu=0.4, planner="paper")


def figures(speed, kv=0.5):
    return CellFigures(
        trained_tokens_per_s=speed,
        generated_tokens_per_s=speed,
        kv_use=kv,
        learner_busy_share=0.2,
        step_s=60.0,
        consumed_staleness_max=4,
        staleness_mean=1.0,
        usual_share=0.9,
        staleness_max=3,
    )


def test_every_parameter_has_its_source():
    tree = yaml.safe_load((cells.HERE / "parameters.yaml").read_text())
    for name, item in tree.items():
        if name not in ("published", "asked"):
            assert item["source"].split(":")[0] in ("paper", "published", "assumption"), name


@pytest.mark.parametrize("arm", list(Arm))
def test_a_shrunk_fleet_has_the_same_share_of_everything(arm):
    whole, part = (replace(CELL, arm=arm, planner="none", shrink=shrink) for shrink in (1, 8))
    for name in ("replicas", "prompts_per_step"):
        sizes = [getattr(config_of(cell).rollout, name) for cell in (whole, part)]
        assert sizes[0] == 8 * sizes[1]
    speeds = [profile_of(cell).learner.train_tokens_per_s for cell in (whole, part)]
    assert speeds[0] == pytest.approx(8 * speeds[1])
    assert config_of(whole).rollout.batch_per_replica == config_of(part).rollout.batch_per_replica


def test_all_cells_of_the_grid_are_runs():
    parameters, seen = read_parameters(), []

    def measured(cell):
        seen.append(cell)
        config_of(cell)
        return figures(1.0)

    rows = list(Comparison(parameters, measured, quick=False).rows())
    assert {cell.arm for cell in seen} == set(Arm)
    assert all(row.value == pytest.approx(1.0) for row in rows if row.name.startswith("over_"))
    assert {(cell.size, cell.gpus) for cell in seen} == {
        (size, gpus) for size, fleets in parameters.fleets.items() for gpus in fleets
    }


def test_a_band_is_over_placements_and_its_middle_is_geometric():
    def measured(cell):
        return figures((2.0 if cell.share == 0.25 else 8.0) if cell.arm is Arm.ASYNC else 1.0)

    rows = {row.name: row for row in Comparison(read_parameters(), measured, quick=False).rows()}
    assert rows["over_sync_mean"].value == 4.0
    assert rows["over_sync_mean"].conditions.startswith("band 2 to 8, 4.00 wide; paper 2.56, inside")
    assert "paper 1.39, outside" in rows["over_partial_mean"].conditions
    assert rows["over_sync_mean_mfu0.15"].value == 8.0, "at the middle split alone"


@pytest.mark.slow
def test_a_cell_is_measured_in_whole_fleets():
    small = replace(CELL, iterations=3)
    found = measure(small)
    assert 0 < found.kv_use < 1
    assert 0 < found.learner_busy_share < 1
    assert found.trained_tokens_per_s * found.step_s == pytest.approx(512 * 16 * 2250, rel=0.25)
