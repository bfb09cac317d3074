"""Test code that calls a program's function, with a verdict that the program cannot forge.

Test code and program run in sandboxes of their own. Where the test code calls the function, its run ends and says
with which arguments; the program is run with them, and the test code again from its start, with all values known
by then. Calls with literal arguments are foreseen and made together. Test code has to be deterministic. Where it
computes more calls than are allowed, a program led it there, or may have: that is no way to have no value.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from laminar_py.records.scoring import NoValueError, TryAgainError
from laminar_py.reward import crossing
from laminar_py.sandbox.pool import SandboxPool
from laminar_py.sandbox.records import SandboxError, SandboxLabel, SandboxResult

MOST_CALLS = crossing.MOST_CALLS
TOGETHER = 100  # calls that are made by one process
SHOWN = 120  # characters of a call
BESIDE = "laminar_crossing"
ANSWER = """

def _laminar_answers(calls):
    import {beside}
    return {beside}.answer_calls({entry}, calls)
"""


class Step(msgspec.Struct, frozen=True):
    """Answer of a run of the test code."""

    needed: list[str] = []  # calls whose values are not known
    fault: str | None = None  # of the program
    broken: str | None = None  # of the test code


class AssertionRun:
    """Test code of one problem against one program, whose function is `entry_point`."""

    def __init__(self, pool: SandboxPool, program: str, entry_point: str) -> None:
        self._pool = pool
        self._program = program + ANSWER.format(beside=BESIDE, entry=entry_point)
        self._entry_point = entry_point
        self._crossing = Path(crossing.__file__).read_text()

    async def check(self, test: str) -> str | None:
        """Fault of the program; None where the test code runs to its end.

        Raises `NoValueError` where it is the test code that is at fault.
        """
        known: list[tuple[str, str | None]] = []
        failed = ""
        while True:
            step = _step(await self._call(self._crossing, "run_tests", [test, self._entry_point, known]))
            if not step.needed:
                return f"{step.fault}{failed}" if step.fault else None
            if len(known) + len(step.needed) > MOST_CALLS:
                return f"calls: the tests call {self._entry_point} more than {MOST_CALLS} times"
            answers, told = await self._answers(step.needed)
            failed = told or failed
            known += zip(step.needed, answers, strict=False)

    async def _answers(self, calls: Sequence[str]) -> tuple[list[str | None], str]:
        """Answers to calls up to the first that ends the process, None for that one, and what is to be told of it.

        Calls after it are made when the test code gets to them: mostly its verdict is made by then.
        """
        found: list[str | None] = []
        for first in range(0, len(calls), TOGETHER):
            answers, told = await self._together(calls[first : first + TOGETHER])
            found += answers
            if told:
                return found, told
        return found, ""

    async def _together(self, calls: Sequence[str]) -> tuple[Sequence[str | None], str]:
        result = await self._call(
            self._program, "_laminar_answers", [calls], files={f"{BESIDE}.py": self._crossing.encode()}
        )
        answers = _answers_in(result)
        if answers is not None and len(answers) == len(calls):
            return answers, ""
        if len(calls) == 1:
            return [None], f" ({self._entry_point}{calls[0]:.{SHOWN}}: {result.label.value}: {result.detail})"
        found: list[str | None] = []
        for call in calls:
            answer, told = await self._together([call])
            found += answer
            if told:
                return found, told
        return found, ""

    async def _call(
        self, program: str, function: str, args: list[object], files: dict[str, bytes] | None = None
    ) -> SandboxResult:
        try:
            return await self._pool.call(program, function, args, files=files)
        except SandboxError as error:
            raise TryAgainError(f"the sandbox: {error}") from error


def _answers_in(result: SandboxResult) -> list[str] | None:
    """Answers that a program's process gave; None where it gave none."""
    if result.label is not SandboxLabel.OK or result.value_json is None:
        return None
    try:
        return msgspec.json.decode(result.value_json, type=list[str])
    except (msgspec.DecodeError, RecursionError):  # a program's bytes
        return None


def _step(result: SandboxResult) -> Step:
    """Answer of a run of the test code. Raises `NoValueError` where that is at fault itself."""
    if result.label is not SandboxLabel.OK or result.value_json is None:
        raise NoValueError(f"the tests of the problem: {result.label.value}: {result.detail}")
    try:
        step = msgspec.json.decode(result.value_json, type=Step)
    except msgspec.DecodeError as error:  # e.g. a text of half a character
        raise NoValueError(f"the tests of the problem: {error}") from error
    if step.broken is not None:
        raise NoValueError(f"the tests of the problem: {step.broken}")
    return step
