"""Admission keeps staleness within its bound for groups that are consumed in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.config.rollout import Schedule, StalePolicy
from laminar_py.control.settings import Admission, StalenessBound
from laminar_py.records.ages import WeightAges


@given(
    st.integers(1, 8),
    st.integers(0, 6),
    st.integers(1, 4),
    st.lists(st.integers(0, 20), min_size=20, max_size=60),
)
def test_groups_consumed_in_order_stay_within_max_staleness(batch, spare, publish_every, pulls):
    """Admit whatever is allowed at any pace; a step takes the oldest `batch` groups, some publish a version."""
    bound = spare + publish_every - 1
    admission = Admission(
        schedule=Schedule.ASYNC, batch=batch, capacity=10_000, max_staleness=bound, publish_every=publish_every
    )
    ages, version, step = WeightAges(), 0, 0
    ages.record_version(version)
    queue = []
    for pull in pulls:
        allowed = admission.allowed(live=len(queue), generating=0)
        queue += [version] * min(pull, allowed)
        if len(queue) >= batch:
            assert max(ages.age_of(begun) for begun in queue[:batch]) <= bound
            queue, step = queue[batch:], step + 1
            ages.record_step(learned=True)
            if step % publish_every == 0:
                version += 1
                ages.record_version(version)


def test_capacity_bounds_live_groups_where_staleness_does_not():
    admission = Admission(schedule=Schedule.ASYNC, batch=4, capacity=10, max_staleness=None)
    assert admission.allowed(live=7, generating=7) == 3


def test_one_step_opens_a_batch_only_when_the_one_before_is_generated():
    admission = Admission(schedule=Schedule.ONE_STEP, batch=32, capacity=1000)
    assert admission.allowed(live=32, generating=4) == 0
    assert admission.allowed(live=32, generating=0) == 32
    assert admission.allowed(live=64, generating=0) == 0


def test_one_step_completes_a_batch_that_some_replicas_were_late_for():
    admission = Admission(schedule=Schedule.ONE_STEP, batch=32, capacity=1000, refills=False)
    assert admission.allowed(live=40, generating=8) == 24, "32 are in the learner"
    assert admission.allowed(live=8, generating=8) == 24
    assert admission.allowed(live=32, generating=4) == 0
    assert admission.allowed(live=32, generating=0) == 32


def test_sync_keeps_one_batch_alive():
    admission = Admission(schedule=Schedule.SYNC, batch=32, capacity=1000)
    assert admission.allowed(live=0, generating=0) == 32
    assert admission.allowed(live=30, generating=30) == 2


@pytest.mark.parametrize(("staleness", "weight"), [(0, 1.0), (3, 1.0), (7, 0.5)])
def test_reweighting_scales_by_the_bound_over_the_staleness(staleness, weight):
    bound = StalenessBound(3, (StalePolicy.REWEIGHT,))
    assert bound.weight(staleness) == weight


def test_drop_keeps_what_is_within_the_bound():
    bound = StalenessBound(3, (StalePolicy.DROP,))
    assert bound.weight(3) == 1.0
    assert bound.weight(4) is None
