"""Runs on a virtual clock: they repeat, keep what every run keeps, and their policies show what they are for."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from laminar_lab.emulation.settings import EngineTimes, emulation_of, read_profile
from laminar_lab.simulate import run as simulate_run
from laminar_lab.simulate.fleet import DelayedChannel
from laminar_lab.simulate.run import STALLED_S, StallWatch, simulate
from laminar_lab.simulate.virtual_loop import virtually
from laminar_lab.step_time import simulated_publish_s
from laminar_py.config.section import ConfigError
from laminar_py.observe.stats import Stats
from laminar_py.rollout.replica import Replica
from tests.simulate.small import run, small

PROFILE = Path("configs/emulation/h100_7b.yaml")
NEVER_DRAINS = ("repack.planner=none", "rollout.on_new_weights=in_place")


@pytest.fixture(scope="module")
def repacked():
    return run()


def test_a_seed_gives_one_run_and_another_seed_another(repacked):
    assert run().rows == repacked.rows
    assert run("seed=1").rows != repacked.rows


def test_every_step_trains_what_it_asked_for_and_never_on_weights_to_come(repacked):
    assert [row.step for row in repacked.rows] == list(range(1, 7))
    assert all(row.trajectories == 48 * 8 for row in repacked.rows)
    assert all(row.version == row.step - 1 for row in repacked.rows), "each step publishes"
    assert all(0 <= row.staleness_mean <= row.staleness_max for row in repacked.rows)
    trained = sum(row.trajectories for row in repacked.rows)
    assert trained <= len(repacked.ended), "nothing is trained on before its end"
    assert all(one.latency_s > 0 for one in repacked.ended)


def test_control_hears_of_every_end_and_each_trajectory_makes_several_events(repacked):
    figures, totals = repacked.figures, repacked.traffic[-1]
    assert totals.events >= 5 * len(repacked.ended), "issued, begun, finished, scored, consumed"
    assert 4 <= totals.reports <= totals.events
    assert figures.trajectories_per_s * 3 < figures.events_per_s


def test_repacking_fills_caches_that_the_tail_left_empty_and_draining_costs_what_is_left(repacked):
    alone, ceiling = run("repack.planner=none").figures, run(*NEVER_DRAINS).figures
    assert alone.kv_use < repacked.figures.kv_use < ceiling.kv_use
    rates = [figures.generated_tokens_per_s for figures in (alone, repacked.figures, ceiling)]
    assert rates == sorted(rates)


def test_under_sync_nothing_is_stale_and_one_step_is_one_step_behind():
    by_batch = ("repack.planner=none", "rollout.engine.start_spread_s=0")
    assert {row.staleness_max for row in run("schedule=sync", *by_batch).rows} == {0}
    assert [row.staleness_max for row in run("schedule=one_step", *by_batch).rows] == [0, 1, 1, 1, 1, 1]


def test_the_last_score_of_a_batch_has_the_next_one_handed_out(monkeypatch):
    by_batch = ("schedule=one_step", "repack.planner=none", "rollout.engine.start_spread_s=0")
    expected_s = run(*by_batch).rows[-1].rl_s
    monkeypatch.setattr(simulate_run, "HOUSEKEEPING_S", 1000.0)
    assert run(*by_batch).rows[-1].rl_s == pytest.approx(expected_s, rel=0.01)


def test_a_run_in_which_no_response_ends_while_steps_count_has_no_figures(tmp_path):
    profile = tmp_path / "quick.yaml"
    profile.write_text(PROFILE.read_text().replace("optimizer_s: 2.0", "optimizer_s: 0.001"))
    few = ("rollout.replicas=1", "rollout.batch_per_replica=16", "rollout.prompts_per_step=1", "steps=2")
    quick = (f"rollout.engine.profile={profile}", "rollout.engine.learner_devices=100000", "repack.planner=none")
    with pytest.raises(ConfigError, match="steps=2: no response ends in the steps that count; raise it"):
        run(
            *few,
            *quick,
            "rollout.engine.compression=1",
            "rollout.engine.start_spread_s=0",
            "rollout.engine.sigma=0",
        )


def test_one_step_in_two_publishes_where_that_is_asked_for():
    assert [row.version for row in run("learner.publish_every=2").rows] == [0, 0, 1, 1, 2, 2]


def test_a_publish_stops_the_learner_and_versions_arrive_at_the_rate_of_the_profile(tmp_path):
    profile = tmp_path / "slow.yaml"
    text = PROFILE.read_text().replace("optimizer_s: 2.0", "optimizer_s: 2.0\n  publish_s: 40.0")
    profile.write_text(f"{text}\nrelay_bytes_per_s: 1.52e9\n")
    slow = f"rollout.engine.profile={profile}"
    assert run().rows[-1].publish_stall_s == 0.0
    stalls = [row.publish_stall_s for row in run(slow, "learner.publish_every=2").rows]
    compression = emulation_of(small(slow)).compression
    assert stalls == pytest.approx([0.0, 40.0 / compression] * (len(stalls) // 2))
    times = read_profile(profile)
    assert simulated_publish_s(small(slow), times) == pytest.approx(10.0 / compression)
    for own in ("rollout.engine.simulation.publish_s=3", "rollout.engine.simulation.link_gbit_per_s=10"):
        assert simulated_publish_s(small(slow, own), times) == (3.0 if "publish" in own else 0.5)


def test_no_more_responses_are_scored_at_a_time_than_there_are_scorers():
    scorers = ("rollout.engine.simulation.scorers=2", "rollout.engine.simulation.reward_median_s=0.1")
    rows = run(*scorers).rows
    assert rows[-1].step * rows[0].trajectories <= 2 * rows[-1].rl_s / 0.1
    assert rows[-1].rl_s < run("rollout.engine.simulation.scorers=1", *scorers[1:]).rows[-1].rl_s


def test_a_bound_on_staleness_holds():
    free = run("rollout.batch_per_replica=200", "repack.planner=none")
    assert max(row.staleness_max for row in free.rows) > 1
    bounded = run(
        "rollout.batch_per_replica=200",
        "repack.planner=none",
        "staleness.max_staleness=1",
        "staleness.policies=[drop]",
    )
    assert max(row.staleness_max for row in bounded.rows) == 1


def test_time_is_up_also_where_the_next_batch_is_there_already(tmp_path):
    slow = tmp_path / "slow.yaml"
    slow.write_text(PROFILE.read_text().replace("train_tokens_per_s: 8675", "train_tokens_per_s: 200"))
    late = run(
        f"rollout.engine.profile={slow}", "rollout.engine.learner_devices=1", "steps=40", "max_rl_seconds=400"
    )
    assert 2 <= len(late.rows) < 40
    assert late.rows[-2].rl_s < 400, "the step in hand is the last"


def test_compressed_time_gives_the_same_figures_but_for_what_the_link_takes(repacked):
    settings = [
        f"repack.interval_s={0.25 * 20}",
        f"repack.max_stall_s={0.25 * 20}",
        "rollout.engine.compression=1",
    ]
    figures = run(*settings).figures
    assert figures.generated_tokens_per_s == pytest.approx(repacked.figures.generated_tokens_per_s, rel=0.1)


def test_what_replicas_say_comes_in_the_order_in_which_they_say_it(monkeypatch):
    said, heard = {}, {}
    collect, take = Replica.next_report, Stats.on_report

    async def noting(replica, timeout_s):
        report = await collect(replica, timeout_s)
        said.setdefault(replica.index, []).append(report)
        return report

    def noted(stats, report):
        heard.setdefault(report.replica, []).append(report)
        take(stats, report)

    monkeypatch.setattr(Replica, "next_report", noting)
    monkeypatch.setattr(Stats, "on_report", noted)
    run()
    for replica, reports in heard.items():
        assert [id(report) for report in reports] == [id(report) for report in said[replica][: len(reports)]]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ["rollout.engine={kind: local}"],
            "rollout.engine.kind=local: .* name the GPU, e.g. --gpu H100, or set the kind to emulated and",
        ),
        (["steps=1"], "steps=1: figures need 2 steps; raise it"),
        (["rollout.engine.profile=none.yaml"], "rollout.engine.profile=none.yaml: no such file"),
        (["rollout.max_seconds=4"], "rollout.max_seconds=4: a cap on time is not simulated; leave it out"),
        (
            ["rollout.engine.median_tokens=50000"],
            "rollout.engine.median_tokens=50000: above the 16384 tokens that the model has of rollout.sampling",
        ),
        (
            ["rollout.engine.simulation.prompt_tokens=20000"],
            "rollout.engine.simulation.prompt_tokens=20000 plus .* is above rollout.max_len=16784",
        ),
        (
            ["rollout.engine.simulation.publish_s=1e9"],
            "rollout.engine.simulation.publish_s=1000000000.0: .* less than or equal to 86400",
        ),
        (["max_rl_seconds=1"], "max_rl_seconds=1.0: ends the run after 0 steps, and figures need 2; raise it"),
        (
            ["rollout.without_signal=refill", "rollout.engine.simulation.solved=1.0"],
            "times in a row at rollout.max_refill=4: .* nothing to learn from, set .*simulation.solved=1 nearer",
        ),
    ],
)
def test_bad_input_is_one_line(settings, line):
    with pytest.raises(ConfigError, match=line):
        run(*settings)


def test_what_engines_compute_for_a_token_is_what_their_profile_says():
    times = EngineTimes(
        step_s=1e-9, sequence_s=1e-3, kv_token_s=0.0, prefill_tokens_per_s=1e12, load_s=0.1, reserve_tokens=1
    )
    config = small("repack.planner=none")
    profile = read_profile(emulation_of(config).profile).model_copy(update={"engine": times})
    assert simulate(config, profile=profile).figures.engine_s_per_token == pytest.approx(1e-3, rel=1e-3)


# ---- the link


def test_what_is_sent_arrives_in_its_order_so_much_later():
    arrived = []

    async def arrive(name):
        arrived.append((name, asyncio.get_running_loop().time()))

    async def lead():
        channel = DelayedChannel(0.5)
        carrying = asyncio.create_task(channel.run())
        for name in "abc":
            channel.send(partial(arrive, name))
        await asyncio.sleep(0.25)
        channel.send(partial(arrive, "d"))
        await asyncio.sleep(1.0)
        carrying.cancel()

    virtually(lead())
    assert arrived == [("a", 0.5), ("b", 0.5), ("c", 0.5), ("d", 0.75)]


# ---- no progress

LIMIT_S = STALLED_S / 20  # by the clock of the run


def look(watch, now_s, *, step=0, ended=0, moved=0, waits=False):
    watch.check_progress(now_s, step=step, ended=ended, moved=(moved, 0), waits=waits)


def test_a_run_in_which_nothing_moves_is_ended():
    watch = StallWatch(small())
    look(watch, 0.0)
    look(watch, LIMIT_S - 1)
    with pytest.raises(ConfigError, match="no response has made progress for 100000 emulated s; lower it"):
        look(watch, LIMIT_S + 1)


def test_a_run_that_moves_or_waits_for_what_is_sure_to_come_goes_on():
    watch = StallWatch(small())
    for place in range(10):
        look(watch, place * 0.9 * LIMIT_S, moved=place)
    for place in range(10, 20):
        look(watch, place * 0.9 * LIMIT_S, moved=9, waits=True)


def test_a_run_whose_responses_all_end_in_vain_is_ended_and_steps_count_anew():
    watch, batch = StallWatch(small()), 48 * 8
    for step in range(5):
        look(watch, step, step=step, ended=step * 100 * batch, moved=step)
    with pytest.raises(ConfigError, match="since step 4, and step 5 is not full, since groups are dropped"):
        look(watch, 5, step=4, ended=1000 * batch, moved=5)
