"""Schedules of others in the simulator: what each waits for, by hand where lengths are constant."""

from functools import cache
from pathlib import Path

import pytest

from experiments.paper.baselines import Baseline, simulate_baseline
from laminar_lab.emulation.settings import read_profile
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.control.consumption import Consumption
from laminar_py.learner.packing import RowSize
from laminar_py.records.spans import versions_of

CONFIG = Path("configs/emulation/repack.yaml")
PROFILE = read_profile(Path("configs/emulation/h100_7b.yaml"))
STEPS, GROUPS, SAMPLES = 4, 48, 8
SMALL = (
    f"steps={STEPS}",
    "rollout.engine.compression=1",
    "rollout.engine.learner_devices=1",  # else microbatches of a part are dealt less evenly than of the whole
    "rollout.replicas=4",
    "rollout.batch_per_replica=96",
    f"rollout.prompts_per_step={GROUPS}",
    "rollout.engine.simulation.shares_prompts=false",  # so a row's time follows from its sequences
)
BY_BATCH = (Baseline.SYNC, Baseline.ONE_STEP, Baseline.STREAM)


def run(baseline, *settings, speed=1.0, sync_s=3.0, updates=8, max_staleness=2):
    learner = PROFILE.learner.model_copy(update={"train_tokens_per_s": speed * PROFILE.learner.train_tokens_per_s})
    return simulate_baseline(
        load_config(CONFIG, [*SMALL, *settings]),
        baseline,
        profile=PROFILE.model_copy(update={"learner": learner}),
        sync_s=sync_s,
        updates=updates,
        max_staleness=max_staleness,
    )


@cache
def usual(baseline):
    return run(baseline)


def end_s(done):
    return done.rows[-1].rl_s


@pytest.fixture
def consumed(monkeypatch):
    """Trajectories that were trained on, in order."""
    found, commit = [], Consumption.commit

    async def noting(consumption, batch, step):
        found.extend(batch.trajectories)
        await commit(consumption, batch, step)

    monkeypatch.setattr(Consumption, "commit", noting)
    return found


def test_a_colocated_step_is_generation_and_training_and_refresh_one_after_another():
    tokens, prompt, per_replica = 1000, 400, 16 * SAMPLES // 4
    done = run(
        Baseline.SYNC,
        "rollout.engine.sigma=0",
        f"rollout.engine.median_tokens={tokens}",
        "rollout.engine.learner_devices=4",
        "rollout.prompts_per_step=16",
        "rollout.engine.simulation.reward_median_s=0",
        sync_s=7.0,
    )
    engine, group_prompts = PROFILE.engine, 16 // 4 * prompt
    generation_s = group_prompts / engine.prefill_tokens_per_s + engine.seconds(
        tokens, running=per_replica, kv_used=per_replica * prompt
    )
    length = tokens + prompt  # 23 fit into 32,768 tokens
    packed = [RowSize(count * length, count * length**2) for count in (23, 23, 23, 23, 23, 13)]
    training_s = PROFILE.learner.step_s(packed, devices=4)
    control_s = done.figures.step_s - generation_s - training_s - 7.0
    assert 0 < control_s < 0.5, "reports and orders take their time on the link"


def test_new_weights_cost_a_barrier_what_they_take():
    quick, slow = (run(Baseline.ONE_STEP, sync_s=sync_s).figures.step_s for sync_s in (0.0, 30.0))
    assert slow - quick == pytest.approx(30.0, abs=1.0)


@pytest.mark.parametrize("speed", [8.0, 0.4, 0.2])
def test_streamed_is_never_slower_than_one_step_on_the_same_lengths(speed):
    streamed, whole = (run(baseline, speed=speed) for baseline in (Baseline.STREAM, Baseline.ONE_STEP))
    assert end_s(streamed) <= end_s(whole) + 1.0
    if speed < 0.4:
        assert streamed.figures.step_s < whole.figures.step_s - 1.0, "its learner does not wait for weights"


def test_schedules_in_batches_are_as_stale_as_they_say():
    staleness = {baseline: [row.staleness_max for row in usual(baseline).rows] for baseline in BY_BATCH}
    assert staleness == {
        Baseline.SYNC: [0] * STEPS,
        Baseline.ONE_STEP: [0, *[1] * (STEPS - 1)],
        Baseline.STREAM: [0, *[1] * (STEPS - 1)],
    }


def test_partial_rollout_is_as_stale_as_its_bound_and_no_more():
    for bound in (1, 2):
        done = run(Baseline.PARTIAL, max_staleness=bound)
        assert max(row.staleness_max for row in done.rows) == bound


@pytest.mark.slow
@pytest.mark.parametrize("baseline", list(Baseline))
def test_every_step_trains_on_its_whole_batch_and_on_nothing_twice(baseline, consumed):
    done = run(baseline)
    assert [row.trajectories for row in done.rows] == [GROUPS * SAMPLES] * STEPS
    assert len({trajectory.id for trajectory in consumed}) == len(consumed) == STEPS * GROUPS * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("baseline", list(Baseline))
def test_partial_rollout_alone_mixes_versions_in_a_response(baseline, consumed):
    run(baseline)
    mixed = sum(len(versions_of(trajectory.spans)) > 1 for trajectory in consumed)
    assert (mixed > 0) == (baseline is Baseline.PARTIAL)


@pytest.mark.slow
@pytest.mark.parametrize("baseline", list(Baseline))
def test_a_seed_gives_one_run(baseline):
    assert run(baseline).rows == usual(baseline).rows
    assert run(baseline, "seed=1").rows != usual(baseline).rows


def test_a_batch_that_does_not_divide_is_one_line():
    with pytest.raises(ConfigError, match=r"updates=7: does not divide .*=48; choose a divisor"):
        run(Baseline.STREAM, updates=7)
