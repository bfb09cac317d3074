"""Runs on a virtual clock whose trajectories have turns: all schedules lead them, and nobody away holds a slot."""

import pytest

from experiments.paper.baselines import Baseline, simulate_baseline
from laminar_lab.emulation.settings import emulation_of, read_profile
from laminar_lab.simulate.run import simulate
from laminar_py.config.section import ConfigError
from laminar_py.records.spans import num_sampled, num_turns
from tests.simulate.small import FAILING, run, small

GAP, COUNT = 40, 4
TURNS = (
    f"rollout.engine.turns={{count: {COUNT}, median_s: 2.0, p95_s: 10.0, observation_tokens: {GAP}}}",
    f"rollout.sampling.max_new_tokens={4096 + (COUNT - 1) * GAP}",
)
ONE = ("rollout.sampling.max_new_tokens=4096",)


@pytest.fixture
def finished(monkeypatch):
    """Trajectories of a simulation that have ended, by their names."""
    from laminar_lab.simulate.rewards import SimulatedRewards

    seen, submit = {}, SimulatedRewards.score_response

    def keep(self, trajectory, **how):
        seen[trajectory.id] = trajectory
        submit(self, trajectory, **how)

    monkeypatch.setattr(SimulatedRewards, "score_response", keep)
    return seen


@pytest.mark.slow
def test_turns_have_the_lengths_of_one_turn_wherever_repacking_and_failures_send_them(finished):
    run(*ONE, "repack.planner=none")
    alone = {name: num_sampled(one.spans) for name, one in finished.items()}
    finished.clear()
    done = run(*TURNS, *FAILING)
    both = finished.keys() & alone.keys()
    assert len(both) > 1000
    assert all(num_sampled(finished[name].spans) == alone[name] for name in both)
    assert {num_turns(one.spans) for one in finished.values()} == {COUNT}
    assert all(one.length == num_sampled(one.spans) + (COUNT - 1) * GAP for one in finished.values())
    assert done.figures.failures > 0


def test_who_waits_for_an_environment_holds_no_slot_and_its_time_is_in_the_latency():
    done, alone = run(*TURNS), run(*ONE)
    assert done.figures.away > 10
    assert done.figures.slots_held_waiting == 0
    assert done.figures.latency_p50_s > alone.figures.latency_p50_s + (COUNT - 1) * 2.0


@pytest.mark.slow
def test_a_seed_gives_one_run_of_turns():
    assert run(*TURNS).rows == run(*TURNS).rows


@pytest.mark.slow
@pytest.mark.parametrize("baseline", Baseline)
def test_schedules_of_others_lead_turns_too(baseline):
    config = small(*TURNS, "buffer.capacity=2000")
    profile = read_profile(emulation_of(config).profile)
    done = simulate_baseline(config, baseline, profile=profile, sync_s=1.0, updates=4, max_staleness=2)
    trained = [row.trajectories for row in done.rows]
    assert len(trained) == 6
    # `partial` drops what its bound calls stale, which one may be that was away as weights came
    assert all(384 - (baseline is Baseline.PARTIAL) * 3 <= count <= 384 for count in trained)
    assert done.figures.slots_held_waiting == 0 < done.figures.away


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("rollout.sampling.max_new_tokens=130", "leaves the model fewer than 16 tokens of max_new_tokens=130"),
        ("rollout.engine.median_tokens=4200", "above the 4096 tokens that the model has"),
        ("environment=task.py:Tool", "emulate turns by rollout.engine.turns"),
    ],
)
def test_turns_that_cannot_be_are_refused_in_one_line(setting, line):
    with pytest.raises(ConfigError, match=line):
        simulate(small(*TURNS, setting))
