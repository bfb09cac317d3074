"""What a part's error means for its run: it is started anew, the user mends something, or we do."""

import asyncio
import errno
import os
import signal
import time
from pathlib import Path

import pytest

from laminar_py.config.section import ConfigError
from laminar_py.records.engine import RefusedError, StoreFullError
from laminar_py.relay.stored_version import NoRoomError
from laminar_py.runtime.cluster.backend import open_cluster
from laminar_py.runtime.cluster.errors import (
    PartBugError,
    PartCrashedError,
    UnwritableError,
    says_out_of_memory,
    unexpected_message,
)
from laminar_py.runtime.cluster.part import Part
from tests.runs.fake_cluster import FakeCluster, joined

PATIENCE_S = 60.0
BUG, DIED, USER = PartBugError, PartCrashedError, ConfigError


class Faulty:
    """Raises what it is told to: several errors as a group."""

    def call(self, *names):
        errors = [{kind.__name__: kind for kind in RAISED}[name]("why") for name in names]
        raise errors[0] if len(errors) == 1 else ExceptionGroup("group", [ExceptionGroup("inner", errors)])

    def fill_disk(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model")

    def fill_store(self):
        raise StoreFullError("segments=there: cannot be written (No space left on device); make room")

    def answer(self):
        return 1

    def vanish(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self):
        time.sleep(PATIENCE_S)

    def answer_no_scalar(self):
        return object()


RAISED = {
    TypeError: BUG,
    ValueError: BUG,
    RuntimeError: DIED,
    MemoryError: DIED,
    RefusedError: DIED,
    NoRoomError: USER,
}


@pytest.fixture
def cluster():
    with open_cluster(None):
        yield


@pytest.fixture(scope="module", params=["forked", "ray"])
def each_cluster(request):
    with open_cluster(None) if request.param == "forked" else joined(FakeCluster(0)):
        yield


async def test_a_bug_is_neither_a_death_nor_the_users_fault(cluster, caplog):
    async def fails(kind):
        part = Part(f"part-{kind.__name__}", Faulty, concurrency=1, timeout_s=PATIENCE_S)
        try:
            await part.call("call", kind.__name__)
        except (PartBugError, PartCrashedError, ConfigError) as error:
            return type(error)

    found = await asyncio.gather(*map(fails, RAISED))
    assert dict(zip(RAISED, found, strict=True)) == RAISED
    assert "in call" in caplog.text, "the traceback is in the log"


async def test_a_bug_anywhere_in_a_group_counts_and_after_that_what_the_user_has_to_mend(each_cluster):
    for names, kind in (
        (("RuntimeError", "NoRoomError", "TypeError"), BUG),
        (("RuntimeError", "NoRoomError"), USER),
        (("RuntimeError", "RefusedError"), DIED),
    ):
        part = Part("part-0", Faulty, concurrency=1, timeout_s=PATIENCE_S)
        with pytest.raises(kind, match="why"):
            await part.call("call", *names)


async def test_a_disk_that_is_full_is_no_death(cluster):
    part = Part("part-0", Faulty, concurrency=1, timeout_s=PATIENCE_S)
    with pytest.raises(UnwritableError, match=r"part-0: \[Errno 28\] No space left on device: 'model'"):
        await part.call("fill_disk")


async def test_a_death_for_want_of_memory_names_what_asked_for_it(cluster):
    part = Part("part-0", Faulty, concurrency=1, timeout_s=PATIENCE_S)
    with pytest.raises(PartCrashedError, match="part-0: out of memory in call: MemoryError: why"):
        await part.call("call", "MemoryError")


def test_the_line_on_a_parts_bug_names_the_error_itself():
    line = unexpected_message(PartBugError("replica-0: TypeError: why"), Path("controller.log"))
    assert "a bug of laminar's: replica-0: TypeError: why; the traceback is in controller.log" in line


async def test_a_bug_in_what_was_sent_without_waiting_shows_at_the_next_call(each_cluster):
    part = Part("part-0", Faulty, concurrency=1, timeout_s=PATIENCE_S)
    part.send("call", "TypeError")
    calls = (await part.call("answer") for _ in iter(int, 1))
    with pytest.raises(PartBugError, match="part-0: TypeError: why"):
        _ = [answer async for answer in calls]


async def test_a_disk_that_is_full_for_a_replicas_tokens_costs_that_replica_and_not_the_run(cluster):
    part = Part("replica-3", Faulty, concurrency=1, timeout_s=PATIENCE_S)
    with pytest.raises(PartCrashedError, match=r"replica-3: StoreFullError: segments=there: .* make room"):
        await part.call("fill_store")


async def test_a_method_that_is_not_there_shows_at_a_later_call(cluster):
    part = Part("part-0", Faulty, concurrency=1, timeout_s=PATIENCE_S)
    part.send("forgotten")
    with pytest.raises(PartBugError, match=r"part-0: AttributeError: .*forgotten"):  # noqa: PT012
        while True:  # Ray may give the answers in another order
            await part.call("answer")


class Cancelled:
    """Its method is cancelled from inside, as one that waits for a task of its own that was."""

    async def wait(self):
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task


class Unmade:
    """Cannot be made."""

    def __init__(self):
        raise TypeError("planted")


@pytest.mark.parametrize(
    ("kind", "method", "outcome"), [(Faulty, "answer_no_scalar", BUG), (Cancelled, "wait", DIED)]
)
async def test_a_call_without_an_answer_that_travels_fails_at_once(each_cluster, kind, method, outcome):
    part = Part("part-0", kind, concurrency=1, timeout_s=PATIENCE_S)
    with pytest.raises(outcome) as raised:
        await part.call(method)
    assert "no answer" not in str(raised.value)


async def test_calls_after_the_run_ended_a_part_say_so(each_cluster):
    part = Part("part-0", Faulty, concurrency=1, timeout_s=PATIENCE_S)
    await part.call("answer")
    part.kill()
    for _ in range(2):
        with pytest.raises(PartCrashedError):
            await part.call("hang")


@pytest.mark.parametrize(
    ("reason", "starved"),
    [
        ("OutOfMemoryError in step: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("MemoryError in start: ", True),
        ("RuntimeError in start: [enforce fail] DefaultCPUAllocator: can't allocate memory", True),
        ("EngineLostError in collect: server: it last said: torch.OutOfMemoryError: full", True),
        ("out of memory: Ray ended it as its node ran low", True),
        ("OSError in step: [Errno 12] Cannot allocate memory", True),
        ("RuntimeError in step: illegal memory access", False),
        ("It may be killed by SIGKILL by OOM killer due to high memory usage", False),
        ("no answer to step in 30 s", False),
    ],
)
def test_what_a_part_said_last_tells_want_of_memory(reason, starved):
    assert says_out_of_memory(reason) is starved
