"""Sessions: variables live from one call to the next, and each call has its own limits."""

import asyncio
from contextlib import suppress

import psutil
import pytest

from laminar_contrib.sandbox.inside.messages import SandboxLimits
from laminar_contrib.sandbox.records import SandboxLabel
from tests.sandbox.conftest import pool_of, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_variables_live_from_one_call_to_the_next(pool):
    async with pool.session(files={"x.txt": b"7"}) as session:
        first = await session.run("def f(x):\n    return x + 1\ny = f(1)")
        second = await session.run("print('y is', y)\nf(int(open('x.txt').read()))")
    assert (first.label, first.stdout, first.alive) == (SandboxLabel.OK, "", True)
    assert (second.label, second.stdout, second.alive) == (SandboxLabel.OK, "y is 2\n8\n", True)


async def test_threads_of_a_session_stand_still_between_its_calls(tier):
    count = "import threading\ndef f():\n    global n\n    while True: n += 1\nn = 0\n"
    async with pool_of(tier, slots=1) as own, own.session() as session:
        await session.run(count + "threading.Thread(target=f, daemon=True).start()")
        (program,) = psutil.Process(own._slots[0]._zygote.pid).children()
        await until(lambda: program.status() == psutil.STATUS_STOPPED)
        assert (await session.run("n > 0")).stdout == "True\n"


async def test_an_exception_does_not_end_a_session(pool):
    async with pool.session() as session:
        await session.run("x = 1")
        failed = await session.run("x += 1; 1 / 0")
        after = await session.run("x")
    assert (failed.label, failed.alive) == (SandboxLabel.ERROR, True)
    assert "ZeroDivisionError" in failed.stderr
    assert (after.stdout, after.stderr) == ("2\n", "")


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("while True: pass", SandboxLabel.TIME),
        ("import time; time.sleep(99)", SandboxLabel.TIME),
        ("import os; os.abort()", SandboxLabel.CRASH),
        ("import os; os._exit(3)", SandboxLabel.ERROR),
        ("while True: print('x' * 999)", SandboxLabel.OUTPUT),
        ("import os; os.closerange(0, 99)", SandboxLabel.ERROR),
    ],
)
async def test_a_call_that_breaks_out_ends_the_session_and_the_next_one_starts_anew(pool, code, label):
    limits = SandboxLimits(cpu_s=1, wall_s=2, output_bytes=1 << 16)
    async with pool.session(limits=limits) as session:
        await session.run("x = 1")
        broken = await session.run(code)
        after = await session.run("print('x' in globals())")
    assert (broken.label, broken.alive) == (label, False)
    assert (after.label, after.stdout) == (SandboxLabel.OK, "False\n")


async def test_a_forged_answer_of_a_session_harms_nobody(pool):
    async with pool.session() as session:
        forged = await session.run("import os\nos.write(4, (1 << 31).to_bytes(4, 'big'))\nwhile True: pass")
        after = await session.run("1 + 1")
    assert not forged.alive
    assert after.stdout == "2\n"


async def test_a_session_that_is_cancelled_starts_anew(pool):
    async with pool.session() as session:
        await session.run("x = 1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await session.run("import time; time.sleep(99)")
        result = await session.run("'x' in globals()")
    assert result.stdout == "False\n"


async def test_a_session_holds_its_slot_until_its_end(pool):
    async with pool.session() as first, pool.session() as second:
        await asyncio.gather(first.run("x = 1"), second.run("x = 2"))
        waiting = asyncio.create_task(pool.run("print(3)"))
        assert (await first.run("x")).stdout == "1\n"
        assert (await second.run("x")).stdout == "2\n"
        assert not waiting.done()
    assert (await waiting).stdout == "3\n"


async def test_a_session_whose_sandbox_is_killed_says_that_its_variables_are_lost(tier):
    async with pool_of(tier, slots=1) as own, own.session() as session:
        await session.run("x = 1")
        zygote = psutil.Process(own._slots[0]._zygote.pid)
        for process in (zygote, *zygote.children(recursive=True)):  # it first, or it tells of the program's end
            with suppress(psutil.NoSuchProcess):  # ended with it
                process.kill()
        lost = await session.run("print('x' in globals())")
        after = await session.run("print('x' in globals())")
    assert (lost.label, lost.alive, lost.stdout) == (SandboxLabel.CRASH, False, "")
    assert "variables are lost" in lost.detail
    assert (after.label, after.stdout) == (SandboxLabel.OK, "False\n")
