"""The term `code`: run the program of a response against the tests of its problem, in a sandbox.

A problem's `tests` have one of two forms. `{"inputs": [...], "outputs": [...]}` has standard input and output as
text, or, with `"fn_name": "solve"`, arguments and value of that function. `{"asserts": "assert f(2) == 4",
"entry_point": "f"}` has any test code that calls that function. A process that runs the program never holds an
expected value, so the program cannot forge a verdict (`tests/reward/test_code.py`).

Test code runs in a sandbox of its own. At a call of the program's function, its run ends and names the arguments.
The program runs with them in another sandbox. Then the test code starts again, with all values known by then; so
it must be deterministic. Calls with literal arguments are made together, ahead. Test code that makes too many
calls counts as a failure of the program, which may have caused it.
"""

import ast
import asyncio
import builtins
import math
import re
import symtable
import sys
import textwrap
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from symtable import Symbol
from typing import Any

import msgspec

from laminar_contrib.code.crossing import MOST_CALLS, unpack
from laminar_contrib.sandbox.inside.program import SET
from laminar_contrib.sandbox.pool import SandboxPool
from laminar_contrib.sandbox.records import SandboxError, SandboxLabel, SandboxResult, SandboxTier
from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.reward import RewardKind, ServeContext, ServedReward, TermConfig
from laminar_py.config.section import Seconds
from laminar_py.records.reasoning import after_reasoning
from laminar_py.records.scoring import NoValueError, Reward, ScoringRequest, TryAgainError
from laminar_py.records.trajectory import Prompt

TOLERANCE = 1e-6  # of floats
LONGEST_NUMBER = 400  # characters
CLOSINGS = 4  # fences at which a block may end
SOLUTION = "Solution"  # class that LeetCode's programs define
SHOWN = 120  # characters of a value or a call, in messages
DECIMAL = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)


def read_value(text: str) -> object:
    """Decode the JSON that a program returned. Raises `ValueError` if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("returned something other than JSON") from error


def same_output(printed: str, wanted: str) -> bool:
    """Compare printed texts: the words of each line are equal, or decimals that differ slightly."""
    left, right = ([line.split() for line in text.strip().split("\n")] for text in (printed, wanted))
    return [len(line) for line in left] == [len(line) for line in right] and all(
        one == other or _near(one, other)
        for ours, theirs in zip(left, right, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )


def same_value(value: object, wanted: object) -> bool:
    """Compare JSON values, where floats may differ slightly; True is not 1."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        near = isinstance(value, float) or isinstance(wanted, float)
        return value == wanted or (near and _close(value, wanted))
    if isinstance(value, dict) and list(value) == [SET] and isinstance(wanted, list):
        return _same_set(value[SET], wanted)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(same_value, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(same_value(value[key], wanted[key]) for key in value)
    return type(value) is type(wanted) and value == wanted


def _same_set(members: object, wanted: list[object]) -> bool:
    """Return True if a returned set has the wanted members, in any order."""
    if not isinstance(members, list):
        return False
    try:
        return same_value(sorted(members, key=_order), sorted(wanted, key=_order))
    except RecursionError:  # a program may nest lists as deeply as can be read
        return False


def _order(value: object, *, is_item: bool = False) -> tuple[int, Any]:
    """Return a key by which JSON values are sorted: numbers by size, also as items of a list."""
    if isinstance(value, int | float):
        return 0, value
    if isinstance(value, list) and not is_item:
        return 1, [_order(each, is_item=True) for each in value]
    return 2, msgspec.json.encode(value)


def _near(printed: str, wanted: str) -> bool:
    """Return True for two decimals that are close; integers must be equal as text."""
    if max(len(printed), len(wanted)) > LONGEST_NUMBER or not (set(wanted) | set(printed)) & set(".eE"):
        return False
    if not all(DECIMAL.fullmatch(word) for word in (wanted, printed)):
        return False
    return _close(float(printed), float(wanted))


def _close(value: float, wanted: float) -> bool:
    try:
        return math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer too large for a float
        return False


def shown(value: object) -> str:
    """Shorten a value for a message."""
    text = repr(value) if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def written_call(function: str, args: Sequence[object], named: Mapping[str, object]) -> str:
    """Return a call as a person writes it, e.g. `f([4.0, 9.0], key=None)`, shortened for a message."""
    text = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in named.items())])
    return f"{function}({text if len(text) <= SHOWN else f'{text[:SHOWN]}...'})"


CROSSING = Path(__file__).with_name("crossing.py")  # runs in sandboxes, on both sides of a call
CALLS_TOGETHER = 100  # calls of the function in one process
BESIDE = "laminar_crossing"
ANSWER = """

def _laminar_answers(calls):
    import {beside}
    return {beside}.answer_calls({entry}, calls)
"""


class Step(msgspec.Struct, frozen=True):
    """Result of one run of the test code."""

    needed: list[str] = []  # calls whose values are not known yet
    fault: str | None = None  # of the program
    broken: str | None = None  # of the test code


class AssertionRun:
    """Runs the test code of a problem against the function `entry_point` of a program."""

    def __init__(self, pool: SandboxPool, program: str, entry_point: str, *, preamble: str) -> None:
        self._pool = pool
        self._preamble = preamble
        entry = called_name(program, entry_point).replace(".", "().")  # a method of an object made for it
        self._program = program + ANSWER.format(beside=BESIDE, entry=entry)
        self._entry_point = entry_point
        self._crossing = CROSSING.read_text()

    async def check(self, test: str) -> str | None:
        """Return a fault of the program, or None if the test code runs to its end.

        Raises `NoValueError` if the test code itself is at fault.
        """
        known: list[tuple[str, str | None]] = []
        failed = ""
        while True:
            step = _step(
                await _run_in_sandbox(
                    self._pool.call(self._crossing, "run_tests", [test, self._entry_point, known])
                )
            )
            if not step.needed:
                return f"{step.fault}{failed}" if step.fault else None
            if len(known) + len(step.needed) > MOST_CALLS:
                return f"calls: the tests call {self._entry_point} more than {MOST_CALLS} times"
            answers, note = await self._answers(step.needed)
            failed = note or failed
            known += zip(step.needed, answers, strict=False)

    async def _answers(
        self, calls: Sequence[str], *, together: int = CALLS_TOGETHER
    ) -> tuple[list[str | None], str]:
        """Call the function with each of `calls`, in order, and stop after the first call that ends the process.

        A process makes at most `together` of them. Returns the answers so far and a note for the user. The answer
        of a fatal call is None, and the note describes it; without a fatal call the note is "". The caller
        requests the remaining calls again if the test code needs them; mostly the verdict is known before.
        """
        known: list[str | None] = []
        for first in range(0, len(calls), together):
            answers, note = await self._call_in_one_process(calls[first : first + together])
            known += answers
            if note:
                return known, note
        return known, ""

    async def _call_in_one_process(self, calls: Sequence[str]) -> tuple[Sequence[str | None], str]:
        """Make `calls` in one process; if the process does not answer them all, make each in its own process.

        Returns answers and a note as `_answers` does.
        """
        result = await _run_in_sandbox(
            self._pool.call(
                self._program,
                "_laminar_answers",
                [calls],
                preamble=self._preamble,
                files={f"{BESIDE}.py": self._crossing.encode()},
            )
        )
        answers = _answers_in(result)
        if answers is not None and len(answers) == len(calls):
            return answers, ""
        if len(calls) == 1:
            call = written_call(self._entry_point, *unpack(msgspec.json.decode(calls[0])))
            return [None], f" ({call}: {result.label.value}: {result.detail or 'no value'})"
        return await self._answers(calls, together=1)


async def _run_in_sandbox(run: Awaitable[SandboxResult]) -> SandboxResult:
    """Return the result of a run. Raises `TryAgainError` if the sandbox itself fails."""
    try:
        return await run
    except SandboxError as error:
        raise TryAgainError(f"the sandbox: {error}") from error


def _answers_in(result: SandboxResult) -> list[str] | None:
    """Decode the answers of a program's process; None if there are none."""
    if result.label is not SandboxLabel.OK or result.value_json is None:
        return None
    try:
        return msgspec.json.decode(result.value_json, type=list[str])
    except (msgspec.DecodeError, RecursionError):  # a program's bytes
        return None


def _step(result: SandboxResult) -> Step:
    """Decode the result of running the test code. Raises `NoValueError` if the test code itself is at fault."""
    if result.label is not SandboxLabel.OK or result.value_json is None:
        raise NoValueError(f"the tests of the problem: {result.label.value}: {result.detail}")
    try:
        step = msgspec.json.decode(result.value_json, type=Step)
    except msgspec.DecodeError as error:  # e.g. a text of half a character
        raise NoValueError(f"the tests of the problem: {error}") from error
    if step.broken is not None:
        raise NoValueError(f"the tests of the problem: {step.broken}")
    return step


FENCE = re.compile(r"`{3,}|~{3,}")
LANGUAGE = re.compile(r"[ \t]*([\w+-]*)")
PYTHON = ("python", "python3", "py")
COMMON_IMPORTS = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, cycle, groupby, islice, permutations, product
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, pi, sqrt
from typing import *
"""  # that prompts of functions take for granted, such as `List` of LeetCode
TOGETHER = 16  # tests of a function that run in one process first
ALL_CASES = """

def _all_cases(cases):
    return [{call}(*case) for case in cases]
"""


class CodeTerm(TermConfig):
    """1 for a program that passes all tests of its problem, else 0; with `partial`, the share that passes."""

    kind: str = "code"
    verdict: bool | str = True
    timeout_s: Seconds | None = 60.0
    """Longest time of a response's tests together; null: `reward.timeout_s`. `sandbox` limits each run."""
    partial: bool = False
    """Give the share of the tests that pass, up to the first that runs out of time; asserts have no share. A share
    is no verdict, so evaluations then have neither accuracy nor pass@k."""

    @property
    def verdict_name(self) -> str | None:
        """Name of the value; None with `partial`."""
        return None if self.partial else super().verdict_name


class Tests(msgspec.Struct, frozen=True, kw_only=True):
    """Field `tests` of a problem, e.g. `{"fn_name": "f", "inputs": [[2]], "outputs": [4]}`."""

    inputs: list[Any] = []
    outputs: list[Any] = []
    fn_name: str = ""
    asserts: str | list[str] = ""
    entry_point: str = ""
    preamble: str = ""  # code that the prompt gave, e.g. helper functions; it runs before the program

    def accepts(self, value: object, wanted: object) -> bool:
        """Return whether a function's value is the wanted one.

        Where each output is a list of one value, as in APPS, that value alone is right, too.
        """
        if same_value(value, wanted):
            return True
        are_wrapped = all(isinstance(output, list) and len(output) == 1 for output in self.outputs)
        return are_wrapped and isinstance(wanted, list) and same_value(value, wanted[0])


class ProblemFields(msgspec.Struct, frozen=True):
    """Fields of a problem that the term `code` reads."""

    tests: dict[str, Any]


def read_tests(fields_json: bytes) -> Tests:
    """Read the tests of a problem; null counts as absent, as tables have it. Raises `msgspec.DecodeError`."""
    tests = msgspec.json.decode(fields_json, type=ProblemFields).tests
    return msgspec.convert({name: value for name, value in tests.items() if value is not None}, Tests)


def fault_in_tests(term: TermConfig, problem: Prompt) -> str | None:
    """Return a complaint about the tests of a problem; None if they can run."""
    try:
        tests = read_tests(problem.fields_json)
    except msgspec.DecodeError as error:
        fields = msgspec.json.decode(problem.fields_json, type=dict[str, msgspec.Raw])
        if "tests" not in fields:
            return f"no `tests` among its fields ({', '.join(fields) or 'it has none'})"
        return f"`tests` cannot be read: {error}"
    if not _parses(tests.preamble):
        return "`tests.preamble` does not parse"
    if bool(tests.inputs) == bool(tests.asserts):
        return "`tests` has neither `inputs` nor `asserts`, or both"
    if len(tests.inputs) != len(tests.outputs):
        return f"`tests` has {len(tests.inputs)} inputs and {len(tests.outputs)} outputs"
    if tests.fn_name and not all(part.isidentifier() for part in tests.fn_name.split(".")):
        return f"`tests.fn_name` is {tests.fn_name!r}, no name of a function"
    if tests.fn_name and not all(isinstance(given, list) for given in tests.inputs):
        return "`tests.inputs` has arguments that are no list"
    if not tests.fn_name and not all(isinstance(text, str) for text in (*tests.inputs, *tests.outputs)):
        return "`tests` has standard input or output that is no text; give `fn_name` where a function is called"
    if tests.asserts:
        return _asserts_fault(tests)
    return None


def _asserts_fault(tests: Tests) -> str | None:
    """Return why a problem's test code cannot run in the sandbox, or None if it can."""
    if not tests.entry_point.isidentifier():
        return f"`tests.entry_point` is {tests.entry_point!r}, no name of a function"
    try:
        table = symtable.symtable(assert_text(tests), "tests", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return f"`tests.asserts` does not parse ({error or type(error).__name__})"
    known = {tests.entry_point, "candidate", *dir(builtins), *defined_names(table)}
    unknown = next((name for name in global_names(table) if name not in known), None)
    if unknown is not None:
        return f"`tests.asserts` uses {unknown!r}, which it does not define"
    tree = ast.parse(assert_text(tests))
    foreign = next((name for name in imported_names(tree) if name not in sys.stdlib_module_names), None)
    if foreign is not None:
        return f"`tests.asserts` imports {foreign!r}, which the sandbox does not have"
    return None


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield packages that code imports at its top level; "." for relative imports."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else str(node.module).partition(".")[0]


def defined_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield global names to which code gives a value."""
    for symbol in table.get_symbols():
        outside = table.get_type() == "module" or symbol.is_declared_global()
        if outside and (symbol.is_assigned() or symbol.is_imported()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from defined_names(child)


def global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield global names that code reads."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from global_names(child)


def preamble_of(tests: Tests) -> str:
    """Return the code that runs before a program: the common imports and what the prompt gave."""
    return f"{COMMON_IMPORTS}\n{tests.preamble}"


def assert_text(tests: Tests) -> str:
    """Return the test code of a problem as one text."""
    return tests.asserts if isinstance(tests.asserts, str) else "\n".join(tests.asserts)


def find_program(response: str, wanted: str = "") -> str:
    """Find the program in a response, after its reasoning.

    It is the last code block, of Python or without a language, that defines the function `wanted` or the class
    `Solution`, else that imports it. Without one it is the last Python block, else the last block, else the text.
    """
    said = after_reasoning(response)
    named = list(code_blocks(said))
    python = [program for name, program in named if name in PYTHON]
    bare = [program for name, program in named if name in ("", *PYTHON)] if wanted else []
    names = {wanted.partition(".")[0], SOLUTION}
    defining = [program for program in bare if not names.isdisjoint(_defined(program))]
    importing = [program for program in bare if not names.isdisjoint(_defined(program, Symbol.is_imported))]
    return (defining or importing or python or [program for _, program in named] or [textwrap.dedent(said)])[-1]


def code_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language, in lower case, and content of each block between fences of ``` or ~~~, without indentation.

    The end of the text closes a block, too. A fence inside a Python program, e.g. in its docstring, does not close
    the block if the program parses only with the lines behind it.
    """
    lines = text.split("\n")
    place = 0
    while place < len(lines):
        fence, language, is_alone = _opening(lines[place])
        place += 1
        if not fence or not (is_alone or language in ("", *PYTHON)):
            continue
        ends = (index for index in range(place, len(lines)) if lines[index].strip().startswith(fence))
        contents = {end: _dedented(lines[place:end]) for end in islice(ends, CLOSINGS)}
        contents = contents or {len(lines): _dedented(lines[place:])}
        end = next(iter(contents))
        if language in ("", *PYTHON):
            end = next((end for end, content in contents.items() if _parses(content)), end)
        yield language, contents[end]
        opens_next = end < len(lines) and _opening(lines[end])[1] in PYTHON
        place = end if opens_next else end + 1


def _opening(line: str) -> tuple[str, str, bool]:
    """Return the fence that opens a block in a line, its language in lower case, and whether it comes first.

    The fence is "" if the line opens none; further fences behind it make it a code span.
    """
    found = FENCE.search(line)
    if found is None or "`" in line[found.end() :] or "~" in line[found.end() :]:
        return "", "", False
    language = LANGUAGE.match(line, found.end())
    return found[0], "" if language is None else language[1].lower(), not line[: found.start()].strip()


def _dedented(lines: Sequence[str]) -> str:
    return textwrap.dedent("".join(f"{line}\n" for line in lines))


def _parses(program: str) -> bool:
    return _symbols(program) is not None


def _symbols(program: str) -> symtable.SymbolTable | None:
    """Return the symbols of a program; None if it does not parse."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the model wrote this code, so nobody can fix it
            return symtable.symtable(program, "program", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _defined(program: str, how: Callable[[Symbol], bool] = Symbol.is_assigned) -> set[str]:
    """Return the global names that a program defines, or imports with `Symbol.is_imported`."""
    table = _symbols(program)
    return set() if table is None else {each.get_name() for each in table.get_symbols() if how(each)}


def called_name(program: str, name: str) -> str:
    """Return the name under which a program has a function: itself, or as a method of its class `Solution`."""
    defined = _defined(program) | _defined(program, Symbol.is_imported)
    return f"{SOLUTION}.{name}" if name.isidentifier() and name not in defined and SOLUTION in defined else name


class CodeReward:
    """Runs the programs of responses in the slots of a sandbox pool."""

    def __init__(self, term: CodeTerm, pool: SandboxPool, *, slots: int) -> None:
        self._term = term
        self._pool = pool
        self.concurrency = slots

    async def __call__(self, request: ScoringRequest) -> Reward:
        """Return 1.0, 0.0, or the share of passed tests, with the first failure as text.

        Tests after a timeout, of CPU or wall time, count as failed; else a program that sleeps would use up
        `timeout_s`. If a busy machine causes such timeouts, raise `sandbox.wall_s`.
        """
        tests = read_tests(request.fields_json)
        program = find_program(request.text_after_reasoning, tests.fn_name or tests.entry_point)
        if not program.strip():
            return Reward(0.0, text="no program after the reasoning")
        if tests.asserts:
            run = AssertionRun(self._pool, program, tests.entry_point, preamble=preamble_of(tests))
            complaint = await run.check(assert_text(tests))
            return Reward(float(complaint is None), text=complaint or "")
        tests = msgspec.structs.replace(tests, fn_name=called_name(program, tests.fn_name))
        failed, first = 0, ""
        async for index in self._tests_to_run_alone(program, tests):
            fault = await self._test(program, tests, index)
            if fault is None:
                continue
            label, text = fault
            first = first or f"test {index + 1}: {text}"
            if not self._term.partial:
                return Reward(0.0, text=first)
            if label is SandboxLabel.TIME:  # the rest counts as failed
                return Reward((index - failed) / len(tests.inputs), text=first)
            failed += 1
        return Reward(1 - failed / len(tests.inputs), text=first)

    async def _tests_to_run_alone(self, program: str, tests: Tests) -> AsyncIterator[int]:
        """Yield the tests that must run alone: the program fails them when many run in one process.

        Such a failure is no verdict, because one call may have changed global state that the next call reads.
        """
        for first in range(0, len(tests.inputs), TOGETHER):
            together = slice(first, first + TOGETHER)
            given, wanted = tests.inputs[together], tests.outputs[together]
            values = await self._call_together(program, tests, given) if tests.fn_name else []
            for index in range(len(given)):
                if len(values) != len(given) or not tests.accepts(values[index], wanted[index]):
                    yield first + index

    async def _call_together(self, program: str, tests: Tests, cases: list[Any]) -> list[Any]:
        """Call a function for several arguments in one process; [] if the run fails."""
        together = program + ALL_CASES.format(call=tests.fn_name.replace(".", "()."))
        run = self._pool.call(together, "_all_cases", [cases], preamble=preamble_of(tests))
        result = await _run_in_sandbox(run)
        if result.label is not SandboxLabel.OK or result.value_json is None:
            return []
        try:
            values = read_value(result.value_json)
        except ValueError:
            return []
        return values if isinstance(values, list) else []

    async def _test(self, program: str, tests: Tests, index: int) -> tuple[SandboxLabel, str] | None:
        """Return the label and the fault of one test; None if it passes. A wrong output has the label `ok`."""
        function, given, wanted = tests.fn_name, tests.inputs[index], tests.outputs[index]
        if not function:
            result = await _run_in_sandbox(self._pool.run(program, stdin=given, preamble=tests.preamble))
            fault = f"printed {shown(result.stdout)}, wanted {shown(wanted)}"
            passes, call = same_output(result.stdout, wanted), "the program"
        else:
            run = self._pool.call(program, function, given, preamble=preamble_of(tests))
            result = await _run_in_sandbox(run)
            found = _value_fault(result, tests, wanted) if result.label is SandboxLabel.OK else None
            passes, fault, call = found is None, found or "", written_call(function, given, {})
        if result.label is not SandboxLabel.OK:
            return result.label, f"{call}: {result.label.value}: {result.detail}"
        return None if passes else (result.label, f"{call} {fault}")


def _value_fault(result: SandboxResult, tests: Tests, wanted: object) -> str | None:
    if result.value_json is None:
        return "returned nothing that could be read"
    try:
        value = read_value(result.value_json)
    except ValueError as error:
        return str(error)
    return None if tests.accepts(value, wanted) else f"returned {shown(value)}, wanted {shown(wanted)}"


@asynccontextmanager
async def open_code(term: CodeTerm, context: ServeContext) -> AsyncIterator[ServedReward]:
    """Open a sandbox pool, and yield the reward that runs programs in it."""
    config = context.sandbox
    async with SandboxPool.from_config(config) as pool:
        yield CodeReward(term, pool, slots=config.slots)


def check_sandbox(term: CodeTerm, sandbox: SandboxConfig) -> None:
    """Open and close a sandbox. Raises `ConfigError` if this machine does not offer the required tier."""

    async def open_pool() -> None:
        async with SandboxPool(slots=1, require=SandboxTier(sandbox.require.value)):
            return

    asyncio.run(open_pool())


CODE = RewardKind(settings=CodeTerm, serve=open_code, caches=True, check=check_sandbox, fault=fault_in_tests)
