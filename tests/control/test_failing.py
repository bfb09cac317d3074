"""When trajectories that fail one after another end a run."""

import pytest

from laminar_py.control.incoming import MIN_FAILURES, OUTAGE_S, ConsecutiveFailures
from laminar_py.records.trajectory import DropReason
from tests.control.fleet import ManualClock


class Told:
    def __init__(self, step=4, in_flight=0):
        self.clock, self.faults = ManualClock(), []
        self.in_flight = in_flight
        self.failures = ConsecutiveFailures(step=step, clock=self.clock, end=self.faults.append)

    def fail(self, times, *, apart_s=0.0):
        for _ in range(times):
            self.failures.failed(DropReason.ENVIRONMENT_FAILED, "no such file", in_flight=self.in_flight)
            self.clock.time += apart_s


def test_a_run_in_which_all_fail_ends_with_the_last_fault():
    told = Told()
    told.fail(MIN_FAILURES - 1)
    assert not told.faults
    told.fail(1)
    (fault,) = told.faults
    assert fault == (
        f"{MIN_FAILURES} trajectories in a row failed (environment_failed), the last: no such file; fix the cause"
        " and --resume"
    )


@pytest.mark.parametrize(("step", "in_flight"), [(4, 0), (512, 0), (4, 600)])
def test_no_fewer_than_a_step_or_than_may_still_finish_end_it(step, in_flight):
    told = Told(step, in_flight)
    told.fail(max(MIN_FAILURES, step, in_flight) - 1)
    assert not told.faults
    told.fail(1)
    assert told.faults


def test_one_that_finishes_now_and_then_keeps_it_alive():
    told = Told()
    for _ in range(20):
        told.fail(MIN_FAILURES - 1)
        told.failures.finished()
    assert not told.faults


def test_where_some_had_finished_what_they_need_may_come_back():
    told = Told()
    told.failures.finished()
    told.fail(2 * MIN_FAILURES, apart_s=OUTAGE_S / (2 * MIN_FAILURES))
    assert not told.faults
    told.fail(1)
    assert len(told.faults) == 1
