"""Closed formulas of a plan: lengths against sampling, decode and drain by hand, the goodput equation."""

from dataclasses import replace

import numpy as np
import pytest

from laminar_lab.emulation.settings import EngineTimes
from laminar_lab.plan.placements import placements
from laminar_lab.plan.request import Lengths
from laminar_lab.plan.stages import ReplicaRates, estimate
from laminar_lab.report.diagnosis import Bottleneck
from laminar_lab.report.mean_step import StageTimes
from laminar_py.config.rollout import Schedule
from tests.plan.builders import LENGTHS, make_request

TIMES = EngineTimes(
    step_s=0.01, sequence_s=1e-5, kv_token_s=1e-8, prefill_tokens_per_s=1e4, load_s=1, reserve_tokens=600
)


def sample(lengths, number, *, seed=0):
    drawn = lengths.median * np.exp(lengths.sigma * np.random.default_rng(seed).standard_normal(number))
    return np.minimum(drawn, lengths.cap)


def test_mean_and_longest_of_a_group_are_those_of_a_sample():
    drawn = sample(LENGTHS, 1_600_000)
    assert LENGTHS.mean == pytest.approx(drawn.mean(), rel=0.01)
    assert LENGTHS.longest_of(16) == pytest.approx(drawn.reshape(-1, 16).max(axis=1).mean(), rel=0.01)


def test_the_longest_of_sixteen_is_four_times_the_mean_and_not_what_the_asymptote_says():
    uncut = Lengths(median=1500, sigma=0.99, cap=10_000_000, prompt=0)
    assert uncut.longest_of(16) / uncut.mean == pytest.approx(4.1, abs=0.1)


def test_percentiles_come_back_as_lengths():
    lengths = Lengths.of_percentiles(800, 8000, cap=100_000, prompt=100)
    p50, p99 = np.percentile(lengths.quantiles, [50, 99])
    assert (p50, p99) == (pytest.approx(800, rel=0.01), pytest.approx(8000, rel=0.02))
    with pytest.raises(ValueError, match="p99=700: is below p50=800"):
        Lengths.of_percentiles(800, 700, cap=1000, prompt=100)


def test_a_full_replica_decodes_as_the_step_formula_says():
    equal = Lengths(median=100, sigma=0.0, cap=1000, prompt=50)
    step_s = 0.01 + 10 * (1e-5 + 1e-8 * 100)  # 50 of the prompt, and 50 on average of the response
    expected = 1000 / (100 * step_s + 10 * 50 / 1e4)
    assert ReplicaRates(TIMES, equal).full_tokens_per_s(10) == pytest.approx(expected, rel=1e-3)


def test_equal_responses_that_begin_together_end_together():
    equal = Lengths(median=100, sigma=0.0, cap=1000, prompt=50)
    seconds = ReplicaRates(TIMES, equal).batch_s(10, 100)
    assert seconds == pytest.approx(100 * (0.01 + 10 * (1e-5 + 1e-8 * 100)) + 10 * 50 / 1e4, rel=0.01)


def test_schedules_are_ordered_as_their_waiting_is():
    request = make_request()
    best = dict.fromkeys(Schedule, 0.0)
    for placement in placements(request):
        best[placement.schedule] = max(best[placement.schedule], estimate(request, placement).tokens_per_s)
    assert best[Schedule.SYNC] < best[Schedule.ONE_STEP] < best[Schedule.ASYNC]


def test_what_binds_is_what_shortens_the_step_most():
    request = make_request()
    learners = [one for one in placements(request) if one.schedule is Schedule.ASYNC and not one.shared]
    few, many = min(learners, key=lambda one: one.learner_gpus), max(learners, key=lambda one: one.learner_gpus)
    assert estimate(request, few).binds is Bottleneck.LEARNER
    assert estimate(request, many).binds in (Bottleneck.GENERATION, Bottleneck.FRESHNESS)


def test_no_bound_leaves_no_wall_of_freshness():
    request = replace(make_request(), max_staleness=None)
    assert all(estimate(request, one).freshness_s == 0.0 for one in placements(request))


def test_an_asynchronous_step_is_an_eighth_longer_where_two_stages_are_alike():
    request = make_request()
    (one, *_) = (place for place in placements(request) if place.schedule is Schedule.ASYNC)
    times = StageTimes(generation_s=9.0, learner_s=10.0, weights_s=1.0)
    alike = replace(estimate(request, one), times=times, freshness_s=0.0)
    assert alike.step_s == pytest.approx(10 * 2 ** (1 / 6))
    apart = replace(alike, times=replace(times, learner_s=5.0))
    assert apart.step_s == pytest.approx(10.0, rel=0.01)
    assert alike.tokens_per_s == pytest.approx(alike.tokens / alike.step_s)


def test_a_tighter_bound_holds_groups_back_longer():
    request = make_request()
    (one, *_) = (place for place in placements(request) if place.schedule is Schedule.ASYNC)
    held = [estimate(replace(request, max_staleness=bound), one).freshness_s for bound in (0, 1, 4)]
    assert held[0] == pytest.approx(2 * held[1], rel=0.2)
    assert held[0] > held[1] > held[2]
