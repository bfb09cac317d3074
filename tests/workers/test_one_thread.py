"""A process whose calls come on many threads computes on one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from laminar_py.runtime.workers.processes.one_thread import OneThread


def test_calls_of_many_threads_compute_on_one_thread_one_after_the_other():
    one, busy, seen = OneThread(), threading.Lock(), set()

    def compute(number):
        assert busy.acquire(blocking=False), "another one computes"
        seen.add(threading.get_ident())
        busy.release()
        return number

    with ThreadPoolExecutor(6) as callers:
        ready = threading.Barrier(6, timeout=30)  # so that there are six callers
        callers_ids = {
            ident for ident, _ in callers.map(lambda _: (threading.get_ident(), ready.wait()), range(6))
        }
        assert list(callers.map(lambda number: one.run(lambda: compute(number)), range(60))) == list(range(60))
    assert len(callers_ids) == 6
    assert len(seen) == 1
    assert not seen & callers_ids


def test_what_was_begun_is_done_before_what_follows_though_it_fails():
    one, begun, seen = OneThread(), threading.Event(), []

    def prepare():
        assert begun.wait(30)
        seen.append(threading.get_ident())
        raise RuntimeError("lost")

    one.begin(prepare)
    begun.set()
    assert one.run(lambda: [*seen, threading.get_ident()]) == 2 * seen


def test_what_it_raises_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        OneThread().run(lambda: 1 // 0)
