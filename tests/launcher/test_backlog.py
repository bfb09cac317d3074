"""Whose fault a failure is: a run's or a slot's."""

from hypothesis import given
from hypothesis import strategies as st

from laminar_lab.launcher.queue import Backlog
from tests.launcher.experiments import make_experiment


def work_off(runs, slots, fails, turns):
    """Runs that ended and those that failed; `fails` is asked by run and slot, `turns` are slots that go next."""
    backlog, ended, failed = Backlog(runs, places=range(slots)), [], []
    while not backlog.is_over:
        slot = next(turns)
        run = backlog.take_run(slot)
        if run is None:
            continue
        if not fails(run, slot):
            backlog.ended()
            ended.append(run.seed)
        elif not backlog.failed(run, slot):
            failed.append(run.seed)
    return ended, failed


def endless(slots):
    while True:
        yield from range(slots)


@given(bad=st.sets(st.integers(0, 19), max_size=8), slots=st.integers(1, 6))
def test_bad_runs_alone_fail_where_slots_are_good(tmp_path_factory, bad, slots):
    runs = make_experiment(tmp_path_factory.mktemp("bad"), seeds=20).runs
    ended, failed = work_off(runs, slots, lambda run, _: run.seed in bad, endless(slots))
    assert sorted(failed) == sorted(bad)
    assert len(ended) == 20 - len(bad)


@given(bad=st.integers(0, 5), slots=st.integers(2, 6))
def test_a_bad_slot_fails_no_run_and_tries_none_twice(tmp_path_factory, bad, slots):
    runs = make_experiment(tmp_path_factory.mktemp("slots"), seeds=20).runs
    tried = []
    ended, failed = work_off(
        runs, slots, lambda run, slot: tried.append((run.name, slot)) or slot == bad, endless(slots)
    )
    assert (len(ended), failed) == (20, [])
    assert len(set(tried)) == len(tried)


def test_a_good_slot_goes_on_after_bad_runs(tmp_path):
    runs = make_experiment(tmp_path, seeds=4).runs
    backlog = Backlog(runs, places=range(2))
    busy = backlog.take_run(1)  # for days
    for run in runs[1:3]:
        assert backlog.take_run(0) is run
        assert backlog.failed(run, 0), "it may be the slot's fault"
    assert (busy, backlog.take_run(0)) == (runs[0], runs[3])
