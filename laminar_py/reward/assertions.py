"""Test code that calls a program's function, with a verdict that the program cannot forge.

Test code and program run in sandboxes of their own. Where the test code calls the function, its run ends and says
with which arguments; the program is run with them, and the test code again from its start, with all values known
by then. Test code has to be deterministic. Values cross as JSON: tuples and sets come as lists, which equal them.
"""

import msgspec

from laminar_py.records.scoring import TryAgainError
from laminar_py.sandbox.pool import SandboxPool
from laminar_py.sandbox.records import SandboxError, SandboxLabel, SandboxResult

MOST_CALLS = 200  # of the function, by the tests of one problem
HARNESS = '''
class _Loose(list):
    """A list that equals a tuple or a set of the same items."""

    def __eq__(self, other):
        if isinstance(other, (set, frozenset)):
            return sorted(map(repr, self)) == sorted(map(repr, other))
        return list(self) == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    __hash__ = None


def _loose(value):
    if isinstance(value, list):
        return _Loose(map(_loose, value))
    if isinstance(value, dict):
        return {key: _loose(each) for key, each in value.items()}
    return value


class _NeededError(BaseException):
    pass


def _main(known, test):
    needed = []

    def candidate(*args):
        given = _json.dumps(args)
        if given not in table:
            needed.append(given)
            raise _NeededError
        value = table[given]
        if value is None:
            raise RuntimeError("the function failed")
        return _loose(_json.loads(value))

    table = dict(known)
    try:
        exec(compile(test, "tests", "exec"), {"__name__": "tests", ENTRY: candidate, "candidate": candidate})
    except _NeededError:
        return {"needed": needed[0]}
    except AssertionError as error:
        return {"fault": f"an assertion fails: {error}"}
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {error}"}
    return {}
'''


class Step(msgspec.Struct, frozen=True):
    """Answer of a run of the test code."""

    needed: str | None = None  # arguments of a call whose value is not known, as JSON
    fault: str | None = None


class AssertionRun:
    """Test code of one problem against one program, whose function is `entry_point`."""

    def __init__(self, pool: SandboxPool, program: str, entry_point: str) -> None:
        self._pool = pool
        self._program = program
        self._entry_point = entry_point
        self._harness = f"import json as _json\nENTRY = {entry_point!r}\n{HARNESS}"

    async def check(self, test: str) -> str | None:
        """Fault of the program; None where the test code runs to its end."""
        known: list[tuple[str, str | None]] = []
        failed = ""
        for _ in range(MOST_CALLS):
            step = self._step(await self._call(self._harness, "_main", [known, test]))
            if step.needed is None:
                return f"{step.fault}{failed}" if step.fault else None
            args = msgspec.json.decode(step.needed)
            result = await self._call(self._program, self._entry_point, args)
            ok = result.label is SandboxLabel.OK
            if not ok:
                failed = f" ({self._entry_point}{tuple(args)!r:.120}: {result.label.value}: {result.detail})"
            known.append((step.needed, result.value_json if ok else None))
        return f"its tests call the function more than {MOST_CALLS} times"

    async def _call(self, program: str, function: str, args: list[object]) -> SandboxResult:
        try:
            return await self._pool.call(program, function, args)
        except SandboxError as error:
            raise TryAgainError(f"the sandbox: {error}") from error

    def _step(self, result: SandboxResult) -> Step:
        if result.label is not SandboxLabel.OK or result.value_json is None:
            return Step(fault=f"its tests: {result.label.value}: {result.detail}")
        return msgspec.json.decode(result.value_json, type=Step)
