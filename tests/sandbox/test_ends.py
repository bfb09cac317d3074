"""Ends of pools, slots and owners: whatever is killed, nothing is left, and the pool goes on."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from laminar_contrib.sandbox.records import SandboxError, SandboxLabel
from tests.sandbox.conftest import BOUND_S, TIGHT, left_since, pool_of, traces, until

OWNER = """
import asyncio, sys
from laminar_contrib.sandbox.records import SandboxTier
from tests.sandbox.conftest import pool_of
async def main():
    async with pool_of(SandboxTier(sys.argv[1]), slots=2) as pool:
        run = asyncio.create_task(pool.run("import time; print('x' * 9, flush=True); time.sleep(99)"))
        await pool.run("1")
        print("here", flush=True)
        await run
asyncio.run(main())
"""


def zygotes():
    """Processes of pools below this one, the outermost first."""
    return psutil.Process().children(recursive=True)


async def test_each_process_of_a_pool_may_be_killed_and_the_pool_goes_on(tier):
    before = traces()
    async with pool_of(tier, slots=1, limits=TIGHT) as pool:
        for which in range(len(zygotes())):
            for process in zygotes()[which : which + 1]:
                process.kill()
            assert (await pool.run("print(1)")).stdout == "1\n"
    assert left_since(before) == {}


@pytest.mark.parametrize("which", [0, 1, -1])
async def test_a_program_whose_processes_are_killed_is_run_again(tier, which):
    before = traces()
    async with pool_of(tier, slots=1, limits=TIGHT) as pool:
        idle = len(zygotes())
        run = asyncio.create_task(pool.run("import time; time.sleep(1); print(1)"))
        await until(lambda: len(zygotes()) > idle)
        zygotes()[min(which, len(zygotes()) - 1)].kill()
        result = await run
        assert (result.label, result.stdout) == (SandboxLabel.OK, "1\n")
        assert (await pool.run("print(2)")).stdout == "2\n"
    assert left_since(before) == {}


async def test_a_run_that_is_cancelled_is_ended(tier):
    before = traces()
    async with pool_of(tier, slots=1) as pool:
        idle = len(zygotes())
        run = asyncio.create_task(pool.run("import time; time.sleep(99)"))
        await until(lambda: len(zygotes()) > idle)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        assert (await pool.run("print(1)")).stdout == "1\n"
    assert left_since(before) == {}


async def test_a_pool_that_is_closed_says_so(tier):
    async with pool_of(tier, slots=1) as pool:
        run = asyncio.create_task(pool.run("import time; time.sleep(99)"))
        waiting = asyncio.create_task(pool.run("1"))
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(SandboxError, match="closed"):
        async with asyncio.timeout(BOUND_S):
            await waiting


async def test_a_slot_that_starts_while_its_pool_closes_is_ended(tier):
    before = traces()
    async with pool_of(tier, slots=1) as pool:
        pool._slots[0].abandon()
        run = asyncio.create_task(pool.run("print(1)"))
        await until(lambda: pool._slots[0].ready)
    with pytest.raises(SandboxError, match="closed"):
        await run
    assert left_since(before) == {}


def test_nothing_outlives_an_owner_that_is_killed(tier):
    before = traces()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, tier.value], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert owner.stdout.readline() == "here\n"
    asyncio.run(until(lambda: len(psutil.Process(owner.pid).children(recursive=True)) >= 3))
    below = psutil.Process(owner.pid).children(recursive=True)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs(below, timeout=BOUND_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    assert left_since(before) == {}


def test_two_owners_have_slots_of_their_own(tier):
    before = traces()
    command = [sys.executable, "-c", OWNER.replace("time.sleep(99)", "0"), tier.value]
    owners = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [owner.communicate(timeout=BOUND_S)[0] for owner in owners] == ["here\n"] * 2
    assert left_since(before) == {}


async def test_a_slot_that_does_not_start_is_taken_after_the_others(tier, monkeypatch):
    async with pool_of(tier, slots=2) as pool:
        broken = pool._slots[0]
        broken.abandon()

        async def fail():
            raise SandboxError("it does not start")

        monkeypatch.setattr(broken, "start", fail)
        with pytest.raises(SandboxError, match="does not start"):
            await pool.run("1")
        for _ in range(3):
            assert (await pool.run("print(1)")).stdout == "1\n"
