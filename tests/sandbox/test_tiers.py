"""Tiers: a machine without fences says why, and none weaker than asked for is taken."""

import tempfile
from pathlib import Path

import pytest

from laminar_contrib.sandbox.doctor import find_sandbox
from laminar_contrib.sandbox.inside import seccomp
from laminar_contrib.sandbox.pool import SandboxPool
from laminar_contrib.sandbox.records import SandboxError, SandboxLabel, SandboxResult, SandboxTier
from laminar_contrib.sandbox.slot import SandboxSlot
from laminar_py.config.section import ConfigError
from tests.sandbox.conftest import left_since, traces, until


@pytest.fixture
def no_fences(monkeypatch):
    """A machine on which slots with fences do not start."""
    start = SandboxSlot.start

    async def refuse(slot):
        if slot.tier is not SandboxTier.NONE:
            raise SandboxError("no Landlock")
        await start(slot)

    monkeypatch.setattr(SandboxSlot, "start", refuse)


async def test_fences_are_used_wherever_they_can_be_had(tier):
    async with SandboxPool(slots=1, require=SandboxTier.NONE) as pool:
        assert pool.tier is not SandboxTier.NONE


async def test_a_slot_that_does_not_start_leaves_no_process(tier, monkeypatch):
    async def fail(slot, *args, **options):
        return SandboxResult(label=SandboxLabel.ERROR, detail="no Landlock")

    monkeypatch.setattr(SandboxSlot, "run", fail)
    before = traces()
    for _ in range(2):
        with pytest.raises(SandboxError, match="its trial program failed: no Landlock"):
            await SandboxSlot(Path(tempfile.gettempdir()) / "pool", "0", tier=tier).start()
    await until(lambda: left_since(before) == {})


async def test_a_pool_without_the_fences_that_it_needs_does_not_open(no_fences):
    with pytest.raises(ConfigError, match=r"sandbox\.require=landlock: .* does not offer it \(no Landlock\)"):
        async with SandboxPool(slots=1):
            pytest.fail("it opened")
    async with SandboxPool(slots=1, require=SandboxTier.NONE) as pool:
        assert pool.tier is SandboxTier.NONE


def test_the_doctor_tells_of_fences_and_of_their_absence(tier, no_fences, monkeypatch):
    found = find_sandbox()
    assert (found.state, found.good) == ("none (no Landlock)", False)
    assert "Linux 5.13" in found.remedy
    monkeypatch.undo()
    assert find_sandbox().good


def test_filters_are_assembled_for_each_machine_that_is_known(monkeypatch):
    for machine in seccomp.ARCHITECTURES:
        monkeypatch.setattr("laminar_py.children.kernel.MACHINE", machine)
        code = seccomp.assemble()
        own = seccomp.for_process(code, 7)
        changed = [at for at in range(0, len(code), 4) if code[at : at + 4] != own[at : at + 4]]
        assert len(changed) == len(seccomp.SIGNALS)
        assert all(own[at : at + 4] == (7).to_bytes(4, "little") for at in changed)
        assert len(code) // 8 < 4096  # the most that the kernel takes
        assert code[-8] == seccomp.RETURN
        steps = [(index, *code[8 * index + 2 : 8 * index + 4]) for index in range(len(code) // 8 - 1)]
        assert all(index + 1 + max(then, other) < len(code) // 8 for index, then, other in steps)
