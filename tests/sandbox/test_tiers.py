"""Tiers: named with their reasons, and never weaker than asked for."""

import pytest

from laminar_contrib.sandbox import places
from laminar_contrib.sandbox.inside import seccomp
from laminar_contrib.sandbox.pool import SandboxPool
from laminar_contrib.sandbox.records import SandboxTier
from laminar_py.children import landlock
from laminar_py.config.section import ConfigError
from tests.sandbox.conftest import left_since, traces


def test_every_tier_is_offered_or_has_a_reason(offers):
    assert list(offers) == list(SandboxTier)
    assert all(offer.offered or offer.reason for offer in offers.values())
    assert offers[SandboxTier.NONE].offered


async def test_the_strongest_tier_is_taken(offers):
    strongest = next(tier for tier, offer in offers.items() if offer.offered)
    async with SandboxPool(slots=1, require=SandboxTier.NONE) as pool:
        assert pool.tier is strongest


async def test_a_tier_below_the_required_one_is_not_taken_even_when_named():
    with pytest.raises(ConfigError, match=r"sandbox\.require=landlock"):
        async with SandboxPool(slots=1, require=SandboxTier.LANDLOCK, tier=SandboxTier.NONE):
            pytest.fail("it opened")


def test_numbers_of_slots_are_not_shared_and_come_free_again():
    before = traces()
    first, second = places.SlotPlace.claim(), places.SlotPlace.claim()
    assert first.number != second.number
    assert not set(first.users) & set(second.users)
    first.release()
    third = places.SlotPlace.claim()
    assert third.number == first.number
    second.release()
    third.release()
    assert left_since(before) == {}


def test_events_of_both_versions_of_cgroups_are_counted(tmp_path):
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n")
    (tmp_path / "pids.events").write_text("max 5\n")
    (tmp_path / "memory.current").write_text("4096\n")
    for name in ("memory.max", "memory.swap.max", "pids.max"):
        (tmp_path / name).write_text("max\n")
    cgroup = places.SlotCgroup(tmp_path, tmp_path)
    assert cgroup.counts() == places.CgroupCounts(2, 5)
    cgroup.measure_own_memory()
    cgroup.set_limits(memory_bytes=100, processes=3)
    limits = [(tmp_path / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")]
    assert limits == ["4196", "0", "5"]
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert places.SlotCgroup(tmp_path, tmp_path).counts() == places.CgroupCounts(1, 5)


def test_filters_are_assembled_for_each_machine_that_is_known(monkeypatch):
    for machine in seccomp.ARCHITECTURES:
        monkeypatch.setattr("laminar_py.children.kernel.MACHINE", machine)
        for alone in (0, 7):
            code = seccomp.assemble(alone=alone)
            assert len(code) % 8 == 0
            assert len(code) // 8 < 4096  # the most that the kernel takes
            assert code[-8] == seccomp.RETURN
            steps = [(index, *code[8 * index + 2 : 8 * index + 4]) for index in range(len(code) // 8 - 1)]
            assert all(index + 1 + max(then, other) < len(code) // 8 for index, then, other in steps)


def test_landlock_tells_its_version():
    assert landlock.version() >= 0
