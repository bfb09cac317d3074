"""A process whose calls come on many threads computes on one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from laminar_py.runtime.workers.processes.base import ComputingActor, on_compute_thread


class Counting(ComputingActor):
    """Sees on which threads it computes."""

    def __init__(self):
        super().__init__()
        self.busy, self.threads = threading.Lock(), set()

    @on_compute_thread
    def work(self, number):
        assert self.busy.acquire(blocking=False), "another one computes"
        self.threads.add(threading.get_ident())
        self.busy.release()
        return 60 // number


def test_calls_of_many_threads_compute_on_one_thread_one_after_the_other():
    part = Counting()
    with ThreadPoolExecutor(6) as callers:
        ready = threading.Barrier(6, timeout=30)  # so that there are six callers
        callers_ids = {
            ident for ident, _ in callers.map(lambda _: (threading.get_ident(), ready.wait()), range(6))
        }
        assert list(callers.map(part.work, range(1, 61))) == [60 // number for number in range(1, 61)]
    assert len(callers_ids) == 6
    assert len(part.threads) == 1
    assert not part.threads & callers_ids


def test_an_error_of_the_compute_thread_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        Counting().work(0)
