"""Programs a second through a sandbox, and the time of one program alone.

The benchmark compares every output with the expected one, and ends at a wrong one.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from laminar_contrib.code.term import same_output, same_value
from laminar_contrib.sandbox import SandboxLabel, SandboxPool, SandboxTier
from laminar_lab.bench.report import Row, log_line, spread


class SmallProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A program, e.g. `SmallProgram(code="print(int(input()) + 3)", stdin="4", wanted="7")`."""

    code: str
    wanted: object  # value of the function, or printed text
    function: str = ""  # to call with `args`; none: a script that reads `stdin`
    args: Sequence[object] = ()
    stdin: str = ""


def make_programs(number: int) -> list[SmallProgram]:
    """Make so many different programs, functions to call and scripts by turns."""
    return [MAKERS[seed % len(MAKERS)](seed) for seed in range(number)]


def _sum_of_multiples(seed: int) -> SmallProgram:
    """Make a function that sums multiples; `seed` changes code, arguments and result."""
    code = (
        "def solve(limit: int, step: int) -> int:\n"
        f'    """Sum of all multiples of step below limit, and {seed}."""\n'
        f"    total = {seed}\n"
        "    for number in range(0, limit, step):\n"
        "        total += number\n"
        "    return total\n"
    )
    limit, step = 50 + seed % 200, 2 + seed % 7
    return SmallProgram(code=code, function="solve", args=[limit, step], wanted=seed + sum(range(0, limit, step)))


def _collatz(seed: int) -> SmallProgram:
    """Make a script that reads a number and prints its Collatz steps plus `seed`."""
    code = (
        "def steps(n):\n    return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)\n\n"
        f"print(steps(int(input())) + {seed})\n"
    )
    start, steps = 2 + seed % 97, 0
    number = start
    while number != 1:
        number, steps = (number // 2 if number % 2 == 0 else 3 * number + 1), steps + 1
    return SmallProgram(code=code, stdin=f"{start}\n", wanted=f"{steps + seed}\n")


def _stack(seed: int) -> SmallProgram:
    """Make a script that pushes multiples of `seed` on a stack and prints the top two."""
    code = (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, item):\n        self.items.append(item)\n\n"
        "    def pop(self):\n        return self.items.pop()\n\n\n"
        f"stack = Stack()\nfor number in range(int(input())):\n    stack.push(number * {seed})\n"
        "print(stack.pop(), stack.pop())\n"
    )
    most = 3 + seed % 40
    return SmallProgram(code=code, stdin=f"{most}", wanted=f"{(most - 1) * seed} {(most - 2) * seed}")


def _two_sum(seed: int) -> SmallProgram:
    """Make a method that finds two numbers of a given sum; `seed` changes code and numbers."""
    code = (
        "from typing import List\n\n\nclass Solution:\n"
        "    def twoSum(self, nums: List[int], target: int) -> List[int]:\n"
        f"        seen = {{}}  # attempt {seed}\n"
        "        for i, x in enumerate(nums):\n"
        "            if target - x in seen:\n"
        "                return [seen[target - x], i]\n"
        "            seen[x] = i\n"
        "        return []\n"
    )
    numbers: list[int] = [seed + 3**power for power in range(20)]  # of which no two pairs have the same sum
    return SmallProgram(
        code=code, function="Solution.twoSum", args=[numbers, numbers[8] + numbers[17]], wanted=[8, 17]
    )


MAKERS = (_sum_of_multiples, _collatz, _two_sum, _stack)


ROWS = ("sandbox_runs_per_s", "sandbox_warm_ms")
ROUNDS = 5
WARM = 40  # runs before the ones that count
ALONE = 200  # runs, one at a time


def rows(*, programs: int = 10_000) -> list[Row]:
    """Measure rate and time in the strongest tier of the machine. A minute for 10,000 programs on two cores."""
    return asyncio.run(_measure(make_programs(programs)))


async def _measure(programs: Sequence[SmallProgram]) -> list[Row]:
    async with SandboxPool(slots=len(os.sched_getaffinity(0)), require=SandboxTier.NONE) as pool:
        rate = await _rate(pool, programs)
        alone = [await _alone_ms(pool) for _ in range(ALONE)]
        conditions = (
            f"`print('ready')`, tier {pool.tier.value}, one at a time, until its result: {spread(alone, '.1f')}"
        )
        return [rate, Row("sandbox_warm_ms", median(alone), "ms", conditions)]


async def _rate(pool: SandboxPool, programs: Sequence[SmallProgram]) -> Row:
    """Measure programs a second, as many at a time as there are slots."""
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
        log_line(f"sandbox, round {number + 1} of {ROUNDS}: {rates[-1]:.0f}")
    conditions = (
        f"{len(programs)} different programs of 4 to 15 lines, calls and scripts by turns, outputs compared; tier"
        f" {pool.tier.value}, {len(os.sched_getaffinity(0))} slots, as many as cores; {ROUNDS} rounds:"
        f" {spread(rates)}"
    )
    return Row("sandbox_runs_per_s", median(rates), "programs/s", conditions)


async def _run_all(pool: SandboxPool, todo: Iterator[SmallProgram]) -> None:
    for program in todo:
        await check(pool, program)


async def check(pool: SandboxPool, program: SmallProgram) -> None:
    """Run a program. Fails with its result if the output is wrong."""
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
