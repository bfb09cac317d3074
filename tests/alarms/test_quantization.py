"""The gate of rounded weights: it lets their usual mismatch pass, and closes for good beyond its bound."""

import math

import pytest

from laminar_py.control.alarms.quantization import QuantizationGate
from laminar_py.control.alarms.weights import EXACT, ProbeCheck
from laminar_py.records.metrics import Mismatch, StepMetrics
from tests.alarms.test_learning import right
from tests.alarms.test_probes import Story


def make_story(*, seed=0, **gate):
    story = Story(seed=seed)
    gate = QuantizationGate(**{"bound": 0.1, "quantizes": True, **gate})
    story.check = ProbeCheck(tolerance=EXACT, compares=gate.compares)
    return story, gate


def go_on(story, gate, **answers):
    gate.published(len(story.versions))
    return story.publish() + story.answer(**answers)


@pytest.mark.parametrize("seed", range(10))
def test_the_noise_of_rounding_is_no_alarm_and_keeps_the_gate_open(seed):
    story, gate = make_story(seed=seed)
    for _ in range(100):
        assert not go_on(story, gate, noise=0.05)
        assert 0.01 < story.check.largest_mean < 0.1
        assert not gate.closes(story.check.largest_mean, of_probes=True)
    assert gate.quantizes


def test_beyond_the_bound_the_gate_closes_once_and_newer_versions_are_compared_exactly():
    story, gate = make_story()
    assert not go_on(story, gate, noise=1.5), "the gate answers a mismatch, not an alarm"
    assert gate.closes(story.check.largest_mean, of_probes=True)
    assert not gate.closes(9.0)
    assert not gate.compares(1), "a replica that has ended may have rounded a version on its way"
    for _ in range(2):
        assert not go_on(story, gate, noise=1e-6), "old answers take no part"
        assert not any(gate.compares(version) for version in (0, 1))
        assert gate.compares(2)
    assert go_on(story, gate, noise=0.05)[0].check == "probes"


def test_a_rounding_engine_that_stays_at_a_version_is_named_once_the_learner_is_far():
    story, gate = make_story()
    story.moves = 0.5
    found = [alarm for _ in range(20) for alarm in go_on(story, gate, computes=0, noise=0.05)]
    assert "do not move" in found[0].message


def test_an_answer_without_a_finite_number_is_an_alarm_whatever_the_rounding():
    story, gate = make_story()
    assert go_on(story, gate, says=lambda logprobs: logprobs * math.nan)[0].check == "probes"


def test_a_step_counts_with_enough_fresh_tokens():
    gate = QuantizationGate(bound=0.1, quantizes=True)
    few, enough = (
        StepMetrics(loss=0.0, grad_norm=1.0, elapsed_s=1.0, mismatch=Mismatch(0.3, 1.0, 2.0), proof=proof)
        for proof in (None, right())
    )
    assert not gate.closes(gate.mismatch_of(few))
    assert gate.closes(gate.mismatch_of(enough))


def test_tokens_from_before_a_resume_or_a_rollback_are_not_compared():
    resumed = QuantizationGate(bound=0.1, quantizes=False, rounded_before=True)
    assert not resumed.compares(7)
    resumed.published(8)
    assert [resumed.compares(version) for version in (7, 8, 9)] == [False, False, True]
    resumed.went_back()
    resumed.published(12)
    assert [resumed.compares(version) for version in (11, 12, 13)] == [False, False, True]
    never = QuantizationGate(bound=0.1, quantizes=False)
    never.went_back()
    assert never.compares(0)
