"""The comparison of schedules with turns: equal devices and tokens, and its table, without the runs."""

import sys

import pytest

from experiments.multi_turn_tails import fleets
from experiments.multi_turn_tails.fleets import ASYNC, FLEETS, STEPS, Baseline, config_of, turns_settings
from laminar_lab.simulate.figures import SimulatedFigures

sys.modules.setdefault("fleets", fleets)  # as the scripts find it, beside themselves

from experiments.multi_turn_tails.run import LATENCY_S, SLOW_S, Comparison  # noqa: E402

SPEEDS = {
    ASYNC: 300.0,
    Baseline.SYNC: 100.0,
    Baseline.ONE_STEP: 150.0,
    Baseline.STREAM: 160.0,
    Baseline.PARTIAL: 290.0,
}


@pytest.mark.parametrize("arm", STEPS)
@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: str(fleet.gpus))
def test_every_schedule_has_all_devices_of_a_quarter_of_the_fleet(arm, fleet):
    replicas, learner = fleet.sizes(arm)
    devices = max(replicas, learner) if arm == Baseline.SYNC else replicas + learner
    assert 4 * devices == fleet.gpus


@pytest.mark.parametrize("latency_s", [LATENCY_S, SLOW_S])
def test_with_turns_the_model_may_have_as_many_tokens_as_in_one(latency_s):
    one, many = (config_of(turns_settings(given)) for given in (None, latency_s))
    assert many.rollout.engine.turns.p95_s == 5 * latency_s
    assert one.rollout.engine.most_sampled(
        one.rollout.sampling.max_new_tokens
    ) == many.rollout.engine.most_sampled(many.rollout.sampling.max_new_tokens)
    assert (
        many.rollout.sampling.max_new_tokens + many.rollout.engine.simulation.prompt_tokens <= many.rollout.max_len
    )


def figures(cell):
    slower = 2.0 if cell.latency_s is not None and cell.arm != ASYNC else 1.0
    found = dict.fromkeys(SimulatedFigures.__struct_fields__, 0)
    speed = (1 + cell.seed) * SPEEDS[cell.arm] / slower
    return SimulatedFigures(**{**found, "trained_tokens_per_s": speed, "slots_held_waiting": cell.fleet.replicas})


def test_a_gain_is_the_ratio_with_turns_over_that_with_one_and_slots_are_the_most_of_any_cell():
    rows = {row.name: row.value for row in Comparison(figures, fleets=FLEETS, seeds=(0, 1, 2)).rows()}
    assert rows["single_async_over_sync"] == pytest.approx(3.0)
    assert rows["turns_async_over_one_step"] == pytest.approx(4.0)
    assert [rows[f"turns_gain_over_single{of}"] for of in ("", "_64")] == pytest.approx([2.0, 2.0])
    assert rows["turns_slots_held_waiting"] == FLEETS[1].replicas
