"""Every hostile program, in every tier that this machine offers: contained, labelled, and nothing left of it."""

import platform

import pytest

from laminar_contrib.sandbox.records import SandboxLabel, SandboxTier
from tests.sandbox.conftest import SONG, metadata
from tests.sandbox.hostile import CALL, HOSTILE, run_hostile

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
async def test_a_hostile_program_is_contained_and_labelled(pool, tier, hostile, server, canary):
    if hostile.walls and tier is SandboxTier.NONE:
        pytest.skip("the tier has no walls")
    if CALL in hostile.program and platform.machine() != "x86_64":
        pytest.skip("numbers of another machine's system calls")
    program = hostile.program.replace("CANARY", str(canary)).replace("PORT", str(server.getsockname()[1]))
    before = metadata(canary)
    result = await run_hostile(pool, hostile, program)
    assert metadata(canary) == before
    assert result.label.value in hostile.labels, result
    assert hostile.prints in (None, result.stdout)
    assert [file.name for file in canary.parent.iterdir()] == ["canary"]
    assert canary.read_text() == SONG
    with pytest.raises(BlockingIOError):
        server.accept()
    again = await pool.run("import os; print(os.listdir(), os.getcwd() == os.environ['HOME'])")
    assert (again.label, again.stdout) == (SandboxLabel.OK, "[] True\n")


async def test_a_program_sees_nothing_of_our_environment(pool, tier, monkeypatch):
    monkeypatch.setenv("LAMINAR_SECRET", "do-not-tell")
    result = await pool.run("import os, json; print(json.dumps(dict(os.environ)))")
    assert "do-not-tell" not in result.stdout
    assert "LAMINAR" not in result.stdout


async def test_no_run_sees_what_another_left(pool):
    for _ in range(4):
        result = await pool.run(
            "import os, sys; print(os.listdir(), hasattr(sys, 'left'), 'left' in os.environ)\n"
            "open('left', 'w').write('x'); sys.left = 1; os.environ['left'] = '1'"
        )
        assert (result.label, result.stdout) == (SandboxLabel.OK, "[] False False\n")
