"""The term `code`: the program in a response is run against the tests of its problem, in a sandbox.

A problem's `tests` are of one of two forms. `{"inputs": [...], "outputs": [...]}`: standard input and output as
text, or, with `"fn_name": "solve"`, arguments and the value of that function. `{"asserts": "assert f(2) == 4",
"entry_point": "f"}`: any test code that calls that function. Invariant: a process that the program runs in never
holds what a test expects, so a verdict cannot be forged from there.

Test code that calls a program's function runs in a sandbox of its own. Where it calls the function, its run ends
and says with which arguments; the program is run with them, and the test code again from its start, with all
values known by then. Calls with literal arguments are foreseen and made together. Test code has to be
deterministic. Where it computes more calls than are allowed, a program led it there, or may have: that is no way
to have no value.
"""

import ast
import builtins
import math
import re
import symtable
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from laminar_py.config.reward import RewardKind, ServeContext, ServedReward, TermConfig
from laminar_py.config.section import Seconds
from laminar_py.records.scoring import NoValueError, Reward, ScoringRequest, TryAgainError
from laminar_py.records.trajectory import Prompt
from laminar_py.reward.crossing import MOST_CALLS
from laminar_py.sandbox.pool import SandboxPool
from laminar_py.sandbox.records import SandboxError, SandboxLabel, SandboxResult

TOLERANCE = 1e-6  # of floats
LONGEST_NUMBER = 400  # characters
SHOWN = 120  # characters of a value or a call
DECIMAL = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)


def read_value(text: str) -> object:
    """A value from a program's JSON. Raises `ValueError` where it is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("returned what is no value") from error


def same_output(printed: str, wanted: str) -> bool:
    """Equality of printed text: line by line without spaces at the ends, or word by word with floats near."""
    if [line.strip() for line in _lines(printed)] == [line.strip() for line in _lines(wanted)]:
        return True
    left, right = [_words(text) for text in (printed, wanted)]
    return [len(line) for line in left] == [len(line) for line in right] and all(
        one == other or _near(one, other)
        for ours, theirs in zip(left, right, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )


def same_value(value: object, wanted: object) -> bool:
    """Equality of JSON values, with floats near; True is not 1."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        near = isinstance(value, float) or isinstance(wanted, float)
        return value == wanted or (near and _close(value, wanted))
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(same_value, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(same_value(value[key], wanted[key]) for key in value)
    return type(value) is type(wanted) and value == wanted


def _lines(text: str) -> Sequence[str]:
    return text.rstrip().split("\n")


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in _lines(text)]


def _near(printed: str, wanted: str) -> bool:
    """True for two decimals that are near each other; integers are exact."""
    if max(len(printed), len(wanted)) > LONGEST_NUMBER or not (set(wanted) | set(printed)) & set(".eE"):
        return False
    if not all(DECIMAL.fullmatch(word) for word in (wanted, printed)):
        return False
    return _close(float(printed), float(wanted))


def _close(value: float, wanted: float) -> bool:
    try:
        return math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False


def shown(value: object) -> str:
    """A value in a few words."""
    text = repr(value) if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


CROSSING = Path(__file__).with_name("crossing.py")  # runs in sandboxes, on both sides of a call
CALLS_TOGETHER = 100  # calls that are made by one process
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
        self._crossing = CROSSING.read_text()

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
        for first in range(0, len(calls), CALLS_TOGETHER):
            answers, told = await self._together(calls[first : first + CALLS_TOGETHER])
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


FENCE = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
PLAIN = frozenset().union(*map(dir, (0, 0.0, 0j, "", b"", [], {}, (), set(), frozenset(), None)))
PYTHON = ("python", "python3", "py")
TOGETHER = 16  # tests of a function that are tried in one process
ALL_CASES = """

def _all_cases(cases):
    return [{call}(*case) for case in cases]
"""


class CodeTerm(TermConfig):
    """1 for a program that passes all tests of its problem, else 0, or the share that it passes."""

    kind: str = "code"
    timeout_s: Seconds | None = 60.0
    """Longest time of all tests of a response; null: `reward.timeout_s`. `sandbox` limits each run."""
    partial: bool = False
    """Give the share of the tests that pass, up to the first that runs out of time; asserts have no share."""


class Tests(msgspec.Struct, frozen=True, kw_only=True):
    """Field `tests` of a problem, e.g. `{"fn_name": "f", "inputs": [[2]], "outputs": [4]}`."""

    inputs: list[Any] = []
    outputs: list[Any] = []
    fn_name: str = ""
    asserts: str | list[str] = ""
    entry_point: str = ""


class ProblemFields(msgspec.Struct, frozen=True):
    """Fields of a problem that this term reads."""

    tests: Tests


def fault_in_tests(term: TermConfig, problem: Prompt) -> str | None:
    """Complaint about the tests of a problem; None where they can be run."""
    try:
        tests = msgspec.json.decode(problem.fields_json, type=ProblemFields).tests
    except msgspec.DecodeError as error:
        fields = msgspec.json.decode(problem.fields_json, type=dict[str, msgspec.Raw])
        if "tests" not in fields:
            return f"no `tests` among its fields ({', '.join(fields) or 'it has none'})"
        return f"`tests` cannot be read: {error}"
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
    asked = next((name for name in attributes_of_values(tree, tests.entry_point) if name not in PLAIN), None)
    if asked is not None:
        return f"`tests.asserts` takes `.{asked}` of what {tests.entry_point} returns, which no plain value has"
    return None


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Packages that code imports in any case; "." for its own."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else str(node.module).partition(".")[0]


def attributes_of_values(tree: ast.Module, entry: str) -> Iterator[str]:
    """Attributes that code takes of a function's values, at once or by names that hold nothing else."""
    nodes = list(ast.walk(tree))
    stored = [_stored(node) for node in nodes]
    given = [
        node.targets[0].id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _calls(node.value, entry)
    ]
    values = {name for name in given if given.count(name) == stored.count(name)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            of = node.value
            if _calls(of, entry) or (isinstance(of, ast.Name) and of.id in values):
                yield node.attr


def _stored(node: ast.AST) -> str | None:
    """Name to which a node gives a value, in any scope."""
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.arg):
        return node.arg
    return getattr(node, "asname", None) or getattr(node, "name", None)  # imports, definitions, `except ... as`


def _calls(node: ast.expr, entry: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (entry, "candidate")


def defined_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Global names to which code gives a value."""
    for symbol in table.get_symbols():
        outside = table.get_type() == "module" or symbol.is_declared_global()
        if outside and (symbol.is_assigned() or symbol.is_imported()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from defined_names(child)


def global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Global names that code reads."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from global_names(child)


def assert_text(tests: Tests) -> str:
    """Test code as one text."""
    return tests.asserts if isinstance(tests.asserts, str) else "\n".join(tests.asserts)


def find_program(response: str, wanted: str = "") -> str:
    """The program in a response, after its thinking.

    The last block, of Python or without a name, that defines the wanted function; else the last block of Python,
    else the last block, else all.
    """
    said = response.rpartition("</think>")[2]
    fenced: list[tuple[str, str]] = FENCE.findall(said)
    named = [(name.strip().lower(), program) for name, program in fenced]
    python = [program for name, program in named if name in PYTHON]
    bare = [program for name, program in named if name in ("", *PYTHON)] if wanted else []
    defining = next((program for program in reversed(bare) if _defines(program, wanted)), None)
    return defining if defining is not None else (python or [program for _, program in fenced] or [said])[-1]


def _defines(program: str, wanted: str) -> bool:
    """True where a program parses and gives a value to a name, e.g. "solve", or "Solution" of "Solution.solve"."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the model's text: they are nobody's to mend
            return wanted.partition(".")[0] in defined_names(symtable.symtable(program, "program", "exec"))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class CodeFault:
    """Reason why a test does not pass, e.g. `CodeFault(SandboxLabel.TIME, "time: more than 5 s on the CPU")`."""

    label: SandboxLabel  # `ok`: the program ended well, with something else than is wanted
    text: str


class CodeReward:
    """Runs programs in the slots of a pool."""

    def __init__(self, term: CodeTerm, pool: SandboxPool, *, slots: int) -> None:
        self._term = term
        self._pool = pool
        self.at_once = slots

    async def __call__(self, request: ScoringRequest) -> Reward:
        """1.0, 0.0, or the share of tests that passed, with the first failure.

        Tests after one that is out of time, be it of the CPU or of the wall, count as failed: programs that sleep
        would use up `timeout_s` else. Where a busy machine is the cause, `sandbox.wall_s` is too low for it.
        """
        tests = msgspec.json.decode(request.fields_json, type=ProblemFields).tests
        program = find_program(request.response, tests.fn_name or tests.entry_point)
        if tests.asserts:
            told = await AssertionRun(self._pool, program, tests.entry_point).check(assert_text(tests))
            return Reward(float(told is None), text=told or "")
        failed, first = 0, ""
        async for index in self._doubtful(program, tests):
            fault = await self._test(program, tests.fn_name, tests.inputs[index], tests.outputs[index])
            if fault is None:
                continue
            first = first or f"test {index + 1}: {fault.text}"
            if not self._term.partial:
                return Reward(0.0, text=first)
            if fault.label is SandboxLabel.TIME:  # those after it are not waited for
                return Reward((index - failed) / len(tests.inputs), text=first)
            failed += 1
        return Reward(1 - failed / len(tests.inputs), text=first)

    async def _doubtful(self, program: str, tests: Tests) -> AsyncIterator[int]:
        """Tests to be run alone: those that the program does not pass when many are tried in one process.

        Nothing is held against it there: one call may have changed what the next one found.
        """
        for first in range(0, len(tests.inputs), TOGETHER):
            some = slice(first, first + TOGETHER)
            given, wanted = tests.inputs[some], tests.outputs[some]
            values = await self._together(program, tests.fn_name, given) if tests.fn_name else []
            for place in range(len(given)):
                if len(values) != len(given) or not same_value(values[place], wanted[place]):
                    yield first + place

    async def _together(self, program: str, function: str, cases: list[Any]) -> list[Any]:
        """Values of a function for several arguments; none where something went wrong on the way."""
        holder, _, method = function.rpartition(".")
        call = f"{holder}().{method}" if holder else function
        result = await self._sandboxed(
            self._pool.call(program + ALL_CASES.format(call=call), "_all_cases", [cases])
        )
        if result.label is not SandboxLabel.OK or result.value_json is None:
            return []
        try:
            values = read_value(result.value_json)
        except ValueError:
            return []
        return values if isinstance(values, list) else []

    async def _test(self, program: str, function: str, given: Any, wanted: Any) -> CodeFault | None:
        """Fault in the result of one test; None where it passes."""
        run = self._pool.call(program, function, given) if function else self._pool.run(program, stdin=given)
        result = await self._sandboxed(run)
        if result.label is not SandboxLabel.OK:
            return CodeFault(result.label, f"{result.label.value}: {result.detail}")
        text = _value_fault(result, wanted) if function else _output_fault(result, wanted)
        return CodeFault(result.label, text) if text is not None else None

    async def _sandboxed(self, run: Awaitable[SandboxResult]) -> SandboxResult:
        """The result of a run. Raises `TryAgainError` where the sandbox itself fails."""
        try:
            return await run
        except SandboxError as error:
            raise TryAgainError(f"the sandbox: {error}") from error


def _output_fault(result: SandboxResult, wanted: str) -> str | None:
    same = same_output(result.stdout, wanted)
    return None if same else f"printed {shown(result.stdout)}, wanted {shown(wanted)}"


def _value_fault(result: SandboxResult, wanted: object) -> str | None:
    if result.value_json is None:
        return "returned nothing that could be read"
    try:
        value = read_value(result.value_json)
    except ValueError as error:
        return str(error)
    return None if same_value(value, wanted) else f"returned {shown(value)}, wanted {shown(wanted)}"


@asynccontextmanager
async def open_code(term: CodeTerm, context: ServeContext) -> AsyncIterator[ServedReward]:
    """The reward while its pool is open."""
    config = context.sandbox
    async with SandboxPool.from_config(config) as pool:
        yield CodeReward(term, pool, slots=config.slots)


CODE = RewardKind(settings=CodeTerm, serve=open_code, caches=True, runs_programs=True, fault=fault_in_tests)
