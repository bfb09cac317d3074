"""Fixed bounds against control, without a run: settings of the variants, the verdict, the named collapse."""

import pytest

from experiments.steering.run import BOUNDS, COLLAPSE, COMMON, TASKS, Outcome, collapse_rows, rows, variants
from laminar_py.config.loading import load_config
from laminar_py.records.events import Alarmed, SettingChanged


def outcome(accuracy, *bounds, alarms=()):
    changes = [
        SettingChanged(step=1, name="staleness.max_staleness", value=bound, by="control") for bound in bounds
    ]
    return Outcome(accuracy=accuracy, steps=50, changes=changes, alarms=list(alarms))


@pytest.mark.parametrize("name", TASKS)
def test_variants_differ_in_the_bound_and_its_control_alone(name):
    task = TASKS[name]
    configs = {
        variant: load_config(task.config, [*COMMON, *task.settings, *settings])
        for variant, settings in variants(BOUNDS).items()
    }
    assert [configs[f"bound_{bound}"].staleness.max_staleness for bound in BOUNDS] == list(BOUNDS)
    same = {one.model_copy(update={"staleness": None}).model_dump_json() for one in configs.values()}
    assert len(same) == 1
    assert set(task.sets) <= configs["control"].eval.sets.keys()


def test_control_holds_within_one_deviation_of_the_best_fixed_bound():
    fixed = {"bound_1": [outcome(0.5), outcome(0.5)], "bound_4": [outcome(0.8), outcome(0.9)]}
    found = {row.name: row for row in rows("t", fixed | {"control": [outcome(0.8, 3, 2)] * 2}, seconds=30)}
    assert found["t_control_margin"].value == pytest.approx(0.8 - (0.85 - 0.0707), abs=1e-4)
    assert found["t_control_margin"].conditions == "control holds: the best fixed is bound_4, less one deviation"
    assert found["t_bound_4"].value == pytest.approx(0.85)
    assert "2 to 2, 2 to 2" in found["t_control"].conditions
    worse = rows("t", fixed | {"control": [outcome(0.7)] * 2}, seconds=30)[-1]
    assert worse.value < 0
    assert "FAILS" in worse.conditions


def test_a_planted_collapse_is_named_at_the_step_of_its_alarm_or_not_at_all():
    alarms = [Alarmed(3, "rewards", "learner", "other"), Alarmed(14, "staleness", "learner", "it fell")]
    (named,) = collapse_rows(outcome(0.1, 1, alarms=alarms))
    assert (named.value, "it fell" in named.conditions) == (14.0, True)
    assert collapse_rows(outcome(0.1))[0].value is None
    load_config(TASKS["quickstart"].config, [*COMMON, *COLLAPSE])
