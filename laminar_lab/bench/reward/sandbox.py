"""Measurements of `laminar bench reward`: programs a second through a sandbox, and how soon one alone is over.

Invariant: every output is compared with what had to come out, and a wrong one ends the benchmark.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from laminar_lab.bench.report import Row
from laminar_lab.bench.reward.programs import SmallProgram, make_programs
from laminar_lab.bench.turns import Tell, spread
from laminar_py.reward.compare import same_output, same_value
from laminar_py.sandbox.pool import SandboxPool
from laminar_py.sandbox.records import SandboxLabel, SandboxTier

ROUNDS = 5
WARM = 40  # runs before those that count
ALONE = 200  # runs of which there is one at a time


def strongest_rows(*, programs: int, tell: Tell) -> list[Row]:
    """Rate and time in the strongest tier that the machine offers. A minute for 10,000 programs on two cores."""
    return asyncio.run(_strongest(make_programs(programs), tell))


def landlock_rows(*, programs: int, tell: Tell) -> list[Row]:
    """Rate of a fifth of the programs in that tier. Raises `ConfigError` where it cannot be had."""
    return asyncio.run(_weaker(SandboxTier.LANDLOCK, make_programs(max(programs // ROUNDS, ROUNDS)), tell))


def none_rows(*, programs: int, tell: Tell) -> list[Row]:
    """Rate of a fifth of the programs without walls."""
    return asyncio.run(_weaker(SandboxTier.NONE, make_programs(max(programs // ROUNDS, ROUNDS)), tell))


async def _strongest(programs: Sequence[SmallProgram], tell: Tell) -> list[Row]:
    async with SandboxPool(slots=len(os.sched_getaffinity(0)), require=SandboxTier.NONE) as pool:
        rate = await _rate(pool, programs, name="sandbox_runs_per_s", tell=tell)
        alone = [await _alone_ms(pool) for _ in range(ALONE)]
        conditions = (
            f"`print('ready')`, tier {pool.tier.value}, one at a time, until its result: {spread(alone, '.1f')}"
        )
        return [rate, Row("sandbox_warm_ms", median(alone), "ms", conditions)]


async def _weaker(tier: SandboxTier, programs: Sequence[SmallProgram], tell: Tell) -> list[Row]:
    async with SandboxPool(slots=len(os.sched_getaffinity(0)), require=tier, tier=tier) as pool:
        return [await _rate(pool, programs, name=f"sandbox_runs_per_s_{tier.value}", tell=tell)]


async def _rate(pool: SandboxPool, programs: Sequence[SmallProgram], *, name: str, tell: Tell) -> Row:
    """Programs a second with as many at a time as there are slots."""
    for _ in range(WARM):
        await _alone_ms(pool)
    rates = []
    for number in range(ROUNDS):
        part = programs[number::ROUNDS]
        began = time.perf_counter()
        todo = iter(part)
        async with asyncio.TaskGroup() as group:
            for _ in range(len(os.sched_getaffinity(0))):
                group.create_task(_run_all(pool, todo), name="runs")
        rates.append(len(part) / (time.perf_counter() - began))
        tell(f"{name}, round {number + 1} of {ROUNDS}: {rates[-1]:.0f}")
    weak = f" ({pool.weaknesses})" if pool.weaknesses else ""
    conditions = (
        f"{len(programs)} different programs of 4 to 15 lines, calls and scripts by turns, outputs compared; tier"
        f" {pool.tier.value}{weak}, {len(os.sched_getaffinity(0))} slots, as many as cores; {ROUNDS} rounds:"
        f" {spread(rates)}"
    )
    return Row(name, median(rates), "programs/s", conditions)


async def _run_all(pool: SandboxPool, todo: Iterator[SmallProgram]) -> None:
    for program in todo:
        await check(pool, program)


async def check(pool: SandboxPool, program: SmallProgram) -> None:
    """Run a program. Fails with what came out where that is wrong."""
    if program.function:
        result = await pool.call(program.code, program.function, program.args)
        right = result.value_json is not None and same_value(
            msgspec.json.decode(result.value_json), program.wanted
        )
    else:
        result = await pool.run(program.code, stdin=program.stdin)
        right = same_output(result.stdout, str(program.wanted))
    right = right and result.label is SandboxLabel.OK
    assert right, f"{program} gave {result}"


async def _alone_ms(pool: SandboxPool) -> float:
    began = time.perf_counter()
    result = await pool.run("print('ready')")
    assert result.stdout == "ready\n", result
    return (time.perf_counter() - began) * 1e3
