"""The prediction is honest without data, right with it, and not misled by what has not ended yet."""

import numpy as np
import pytest

from laminar_py.records.replica import TrajectorySummary
from laminar_py.repack.signals import EngineSpeed, GroupForecast, RemainingTokens
from tests.repack.fleets import SPEED

CAP = 16_384


def drawn(count, *, seed=0):
    lengths = 1500 * np.exp(0.99 * np.random.default_rng(seed).standard_normal(count))
    return np.clip(lengths, 16, CAP).astype(int)


def trained(lengths, *, running=()):
    model = RemainingTokens(CAP, keep=1.0)
    for length in lengths:
        model.finished(int(length), capped=length >= CAP)
    model.update(running)
    return model


def mean_beyond(lengths, at):
    return float((lengths[lengths > at] - at).mean())


def test_without_data_a_response_goes_on_for_about_as_long_as_it_has_been_going():
    expected = RemainingTokens(CAP).expected(np.array([100.0, 1000.0]))
    assert 50 < expected[0] < 700
    assert 500 < expected[1] < 7000
    assert expected[0] < expected[1]


def test_nothing_is_expected_beyond_the_cap():
    expected = RemainingTokens(CAP).expected(np.array([CAP - 10.0, CAP]))
    assert 0 < expected[0] <= 10
    assert expected[1] == 0


@pytest.mark.parametrize("at", [0, 500, 2000, 6000])
def test_with_data_it_is_the_mean_of_those_that_were_longer(at):
    lengths = drawn(4000)
    expected = trained(lengths).expected(np.array([float(at)]))[0]
    assert expected == pytest.approx(mean_beyond(drawn(200_000, seed=1), at), rel=0.15)


def test_responses_are_taken_in_together_as_they_would_be_one_after_another():
    looked_at_each, together = RemainingTokens(CAP, keep=0.99), RemainingTokens(CAP, keep=0.99)
    together.MOST_NEW = 100
    for length in drawn(250):
        for model in (looked_at_each, together):
            model.finished(int(length), capped=length >= 9000)
        looked_at_each.update(())
    together.update(())
    at = np.array([0.0, 500.0, 2000.0, 6000.0])
    assert together.expected(at) == pytest.approx(looked_at_each.expected(at), rel=1e-9)


def test_responses_that_still_run_count_so_the_short_ones_do_not_make_all_look_short():
    lengths = drawn(4000)
    ended, running = lengths[lengths <= 1500], np.full((lengths > 1500).sum(), 1500)
    truth = mean_beyond(lengths, 1000)
    blind = trained(ended).expected(np.array([1000.0]))[0]
    seeing = trained(ended, running=running).expected(np.array([1000.0]))[0]
    assert blind < 0.6 * truth
    assert abs(seeing - truth) < abs(blind - truth) / 2


def test_a_prompt_whose_finished_samples_were_long_makes_the_others_look_longer():
    model = trained(drawn(2000))
    held = [
        TrajectorySummary(trajectory_id="a", context=1400, length=1000),
        TrajectorySummary(trajectory_id="b", context=1400, length=1000),
        TrajectorySummary(trajectory_id="c", context=1400, length=1000),
    ]
    average = model.of_new

    def finished(name: str) -> list[int]:
        return {"b": [2 * average] * 4, "c": [1] * 4}.get(name, [])

    plain, longer, shorter = GroupForecast(model, finished)(held)
    assert plain == model.expected(np.array([1000.0]))[0]
    assert longer == pytest.approx(1.5 * plain)
    assert shorter == pytest.approx(0.5 * plain, rel=0.01)


def test_a_policy_that_learns_to_be_short_is_followed():
    model = RemainingTokens(CAP)
    for length in [8000] * 500 + [200] * 5000:
        model.finished(length, capped=False)
    model.update(())
    assert model.expected(np.array([0.0]))[0] < 400


def test_a_decode_step_takes_what_it_reads():
    assert SPEED.decode_s(sequences=48, kv_tokens=120_000) == pytest.approx(0.0296)
    assert EngineSpeed(
        step_s=0.02, step_s_per_sequence=0.001, step_s_per_token=0.0, prefill_tokens_per_s=1.0
    ).rate(sequences=20, kv_tokens=0) == pytest.approx(500)
