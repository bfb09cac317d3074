"""A death for want of memory is told from others: by what was said, or by what the kernel of its node counts."""

import subprocess
import sys
from pathlib import Path

import pytest

from laminar_py.records.codec import decode, encode
from laminar_py.runtime.cluster import part
from laminar_py.runtime.cluster.errors import PartDiedError, for_memory
from laminar_py.runtime.cluster.part import KernelKills, Kills, kernel_kills
from laminar_py.runtime.cluster.placement import Place

PATIENCE_S = 60.0


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


class Node:
    """A node whose kernel has ended so many processes, and a part on it."""

    def __init__(self, monkeypatch, count, *, own=True):
        self.name, self.count, self._own = "learner-0", count, own
        self.place, self.looks = Place("a"), 0
        monkeypatch.setattr(part, "on_node", self.on_node)

    async def on_node(self, node, function):
        assert (node, function) == ("a", kernel_kills)
        self.looks += 1
        return encode(Kills(self.count, own=self._own))

    async def call_for(self, kind, method):
        return Kills(self.count, own=self._own)


VANISHED = PartDiedError("learner-0", "The actor died unexpectedly", vanished=True)


async def test_a_rise_of_the_kernels_count_explains_one_death_on_that_node(monkeypatch):
    node, kills = Node(monkeypatch, 3), KernelKills()
    assert await kills.explain_death(VANISHED, "a") is VANISHED, "nobody has looked at that node before"
    await kills.note_count(node)
    assert await kills.explain_death(VANISHED, "a") is VANISHED
    node.count += 1
    explained = await kills.explain_death(VANISHED, "a")
    assert explained.reason == "out of memory: the kernel ended a process (The actor died unexpectedly)"
    assert (explained.part, for_memory(explained.reason)) == ("learner-0", True)
    assert await kills.explain_death(VANISHED, "a") is VANISHED


async def test_a_kill_from_before_a_part_started_is_not_the_cause_of_its_death(monkeypatch):
    node, kills = Node(monkeypatch, 3), KernelKills()
    await kills.note_count(node)
    node.count += 1
    await kills.note_count(node)
    assert await kills.explain_death(VANISHED, "a") is VANISHED


async def test_a_kill_still_explains_its_death_when_another_part_has_started_on_that_node_since(monkeypatch):
    learner, kills = Node(monkeypatch, 3), KernelKills()
    await kills.note_count(learner)
    learner.count += 1
    learner.name = "replica-0"
    await kills.note_count(learner)
    assert "out of memory" in (await kills.explain_death(VANISHED, "a")).reason
    other = PartDiedError("replica-0", "The actor died unexpectedly", vanished=True)
    assert await kills.explain_death(other, "a") is other, "it had not started then"
    learner.count += 1
    assert "out of memory" in (await kills.explain_death(other, "a")).reason
    assert await kills.explain_death(VANISHED, "a") is VANISHED, "of two deaths a kill explains one"


async def test_a_count_of_the_whole_host_is_told_as_a_guess(monkeypatch):
    node, kills = Node(monkeypatch, 0, own=False), KernelKills()
    await kills.note_count(node)
    node.count += 1
    assert "of its host, perhaps it" in (await kills.explain_death(VANISHED, "a")).reason


async def test_the_kernel_is_not_asked_about_a_part_that_hung_or_said_why_it_ended(monkeypatch):
    node, kills = Node(monkeypatch, 0), KernelKills()
    await kills.note_count(node)
    node.count += 1
    for reason in ("no answer to collect in 60 s", "EngineLostError: no token for 60 s"):
        death = PartDiedError("replica-0", reason)
        assert await kills.explain_death(death, "a") is death
    said = PartDiedError("replica-0", "out of memory: Ray ended it as its node ran low", vanished=True)
    assert await kills.explain_death(said, "a") is said
    assert node.looks == 0


@pytest.mark.parametrize(
    ("groups", "file", "text", "found"),
    [
        ("0::/pod/main\n", "groups/pod/main/memory.events", "low 0\noom 2\noom_kill 5\n", Kills(5, own=True)),
        ("0::/pod/main\n", "groups/memory.events", "oom_kill 5\n", Kills(5, own=True)),
        (
            "9:name=systemd:/\n4:memory:/pod\n0::/\n",
            "groups/memory/pod/memory.oom_control",
            "under_oom 0\noom_kill 5\n",
            Kills(5, own=True),
        ),
        ("4:memory:/pod\n", "groups/memory/memory.oom_control", "oom_kill 5\n", Kills(5, own=True)),
        ("0::/pod\n", "elsewhere", "oom_kill 5\n", Kills(7, own=False)),
    ],
)
def test_the_count_is_that_of_the_own_group_or_else_of_the_host(groups, file, text, found, tmp_path, monkeypatch):
    for name, words in ((file, text), ("proc/self/cgroup", groups), ("proc/vmstat", "pgfault 3\noom_kill 7\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(words)
    monkeypatch.setattr(part, "PROC", tmp_path / "proc")
    monkeypatch.setattr(part, "GROUPS", tmp_path / "groups")
    assert decode(Kills, kernel_kills()) == found


def test_without_any_count_there_are_no_kills(tmp_path, monkeypatch):
    monkeypatch.setattr(part, "PROC", tmp_path)
    assert decode(Kills, kernel_kills()) == Kills(0, own=False)


GROUP = Path("/sys/fs/cgroup/memory/laminar-test")
IN_GROUP = """
import subprocess, sys
from pathlib import Path
from laminar_py.runtime.cluster.part import kernel_kills
from laminar_py.records.codec import decode
from laminar_py.runtime.cluster.part import Kills
(Path(sys.argv[1]) / "cgroup.procs").write_text("0")
before = decode(Kills, kernel_kills())
code = subprocess.run([sys.executable, "-c", "bytearray(1 << 30)"]).returncode
after = decode(Kills, kernel_kills())
print(code, after.count - before.count, before.own, after.own)
"""


@pytest.fixture
def small_group():
    """A control group of half a GiB, where this process may make one."""
    try:
        GROUP.mkdir()
    except OSError:
        pytest.skip("needs a control group of memory (v1) that can be written")
    try:
        (GROUP / "memory.limit_in_bytes").write_text(str(1 << 29))
        yield GROUP
    finally:
        GROUP.rmdir()


def test_a_process_that_the_kernel_really_ends_for_memory_is_counted(small_group):
    command = [sys.executable, "-c", IN_GROUP, str(small_group)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split() == ["-9", "1", "True", "True"], done.stderr
