"""Programs of the host that code may start, where folders of them are named: behind the same fences."""

import re

import pytest

from laminar_contrib.sandbox.pool import SandboxPool
from laminar_contrib.sandbox.python_session import PythonSession
from laminar_contrib.sandbox.records import SandboxTier
from laminar_contrib.sandbox.slot import SandboxSlot
from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.section import ConfigError


@pytest.fixture
async def session(offers):
    if not offers[SandboxTier.NAMESPACES].offered:
        pytest.skip(offers[SandboxTier.NAMESPACES].reason)
    async with SandboxPool(slots=1, programs=["/usr"]) as pool:
        session = PythonSession(pool)
        yield session
        await session.close()


async def test_a_shell_runs_programs_in_the_folder_of_its_session(session):
    assert session.has_shell
    assert await session.shell("seq 3 | sort -r | head -2 > mine; wc -l < mine") == "2"
    assert await session.shell("cat mine; exit 3") == "3\n2\nexit status 3"
    said = await session.shell("echo one; ls no-such-file; echo two")
    assert re.fullmatch(r"one\nls: .*no-such-file.*\ntwo", said), said
    assert await session.python("open('mine').read()") == r"'3\n2\n'"
    assert "not found" in await session.shell("no-such-program")


async def test_programs_have_the_fences_of_code(session, canary, server):
    await session.shell(f"cat {canary}; echo changed > {canary}; echo changed > {canary}.other")
    assert [canary.read_text(), list(canary.parent.iterdir())] == ["unchanged", [canary]]
    assert "unchanged" not in await session.shell(f"cat {canary}")
    assert "exit status" in await session.shell("echo changed > /usr/mine")
    address = f"127.0.0.1:{server.getsockname()[1]}"
    connects = f"perl -MIO::Socket::INET -e 'IO::Socket::INET->new(\"{address}\") or exit 1'"
    assert await session.shell(connects) == "exit status 1"
    with pytest.raises(BlockingIOError):
        server.accept()
    assert (await session.shell("sleep 60 & sleep 60")).startswith("time: ")
    assert await session.shell("exit 0") == "no output"


async def test_where_none_are_named_there_are_none():
    async with SandboxPool(slots=1) as pool:
        session = PythonSession(pool)
        assert not session.has_shell
        said = await session.shell("ls")
        await session.close()
    assert "Error" in said.splitlines()[-1]


@pytest.mark.parametrize("tier", [SandboxTier.LANDLOCK, SandboxTier.NONE])
async def test_a_tier_that_would_show_more_is_not_taken(tier):
    with pytest.raises(ConfigError, match=r"sandbox\.programs: the tier namespaces, which they need, cannot"):
        async with SandboxPool(slots=1, require=tier, tier=tier, programs=["/usr"]):
            pytest.fail("it opened")


async def test_programs_without_what_they_load_are_no_shell(offers):
    if not offers[SandboxTier.NAMESPACES].offered:
        pytest.skip(offers[SandboxTier.NAMESPACES].reason)
    async with SandboxPool(slots=1, programs=["/usr/share"]) as pool:
        assert not pool.has_shell
        assert (await pool.run("print(1)")).stdout == "1\n"


async def test_programs_that_code_could_not_start_are_refused(monkeypatch, offers):
    if not offers[SandboxTier.NAMESPACES].offered:
        pytest.skip(offers[SandboxTier.NAMESPACES].reason)
    monkeypatch.setattr(SandboxSlot, "alone", True)
    with pytest.raises(
        ConfigError, match=r"sandbox\.programs: code may start no process .*; run as root, or leave"
    ):
        async with SandboxPool(slots=1, programs=["/usr"]):
            pytest.fail("it opened")


@pytest.mark.parametrize("folder", ["/no/such", "/etc/hostname"])
async def test_a_folder_that_is_not_there_is_named(folder):
    with pytest.raises(ConfigError, match=f"sandbox.programs={folder}: no folder of this machine"):
        async with SandboxPool.from_config(SandboxConfig(programs=(folder,))):
            pytest.fail("it opened")


@pytest.mark.parametrize("folder", ["/..", "/proc", "/dev/shm", "/usr/../tmp", "/sys/fs"])
async def test_a_folder_that_code_may_not_see_is_refused(folder):
    with pytest.raises(ConfigError, match=r"sandbox\.programs=\S+: code may not see this; name another"):
        async with SandboxPool.from_config(SandboxConfig(programs=(folder,))):
            pytest.fail("it opened")


@pytest.mark.parametrize("folder", ["usr", "", "/", "//"])
def test_a_folder_without_its_whole_path_is_refused(folder):
    with pytest.raises(ValueError, match=f"sandbox.programs={folder}: no absolute path of a folder"):
        SandboxConfig(programs=(folder,))
