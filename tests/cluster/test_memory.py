"""A death for want of memory is told from others: by what was said, or by what the kernel of its node counts."""

from types import SimpleNamespace

import pytest

from laminar_py.cluster import memory
from laminar_py.cluster.errors import PartDiedError, for_memory
from laminar_py.cluster.memory import KernelKills, kernel_kills
from laminar_py.cluster.placement import Place
from laminar_py.records.codec import decode, encode


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
    assert for_memory(reason) is starved


async def test_a_rise_of_the_kernels_count_explains_one_death_on_that_node(monkeypatch):
    counts = {"a": 3, "b": 0}

    async def on_node(node, function):
        return encode(counts[node])

    async def ask(kind, method):
        return counts["a"]

    monkeypatch.setattr(memory, "on_node", on_node)
    kills, death = KernelKills(), PartDiedError("learner-0", "The actor died unexpectedly")
    assert await kills.explain(death, "a") is death, "nobody has looked at that node before"
    await kills.meet(SimpleNamespace(place=Place("a"), ask=ask))
    assert await kills.explain(death, "a") is death
    counts["a"] += 1
    explained = await kills.explain(death, "a")
    assert for_memory(explained.reason)
    assert explained.part == "learner-0"
    assert "The actor died unexpectedly" in explained.reason
    assert await kills.explain(death, "a") is death


def test_the_kernels_count_is_read_where_there_is_one(tmp_path, monkeypatch):
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 5\n")
    monkeypatch.setattr(memory, "COUNTERS", (tmp_path / "nowhere", tmp_path / "memory.events"))
    assert decode(int, kernel_kills()) == 5
    monkeypatch.setattr(memory, "COUNTERS", ())
    assert decode(int, kernel_kills()) == 0
