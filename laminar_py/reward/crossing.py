"""Values that cross between test code and the function that it tests, and both ends of a call.

The text of this file is run in sandboxes, in one beside the program and in another with the test code, so that it
needs nothing but the standard library. Invariant: a value arrives as it left, a tuple as a tuple; one that has no
plain form is refused by name.
"""

import ast
import builtins
import json
import random
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

MOST_LITERAL = 1000  # calls that are foreseen


class UnknownValueError(BaseException):
    """Test code needs the value of a call that is not known yet; ends it."""


class TestFaultError(BaseException):
    """Test code does what it cannot do here."""


def pack(value: Any) -> Any:
    """A value as JSON has it. Raises `TypeError` for one without a plain form."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
    if isinstance(value, tuple | set | frozenset):
        kind = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind))
        return {kind.__name__: _packed(value if kind is tuple else sorted(value, key=repr))}
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(of)] for key, of in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list | deque | range | Iterator | KeysView | ValuesView | ItemsView):
        return _packed(value)
    raise TypeError(f"a value of type {type(value).__name__} has no plain form")


def unpack(packed: Any) -> Any:
    """The value again."""
    if isinstance(packed, list):
        return [unpack(each) for each in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "dict":
        return {unpack(key): unpack(of) for key, of in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    made: Callable[[Any], Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return made(unpack(content))


def _packed(values: Iterable[Any]) -> list[Any]:
    return [pack(each) for each in values]


def answer_calls(function: Callable[..., Any], calls: list[str]) -> list[str]:
    """Answers of a function to calls, in the program's own process: `{"value": ...}` or `{"raised": [...]}`."""
    return [_answer(function, call) for call in calls]


def _answer(function: Callable[..., Any], call: str) -> str:
    args, named = given = unpack(json.loads(call))
    try:
        answer = {"value": pack(function(*args, **named))}
        if pack(given) != pack(unpack(json.loads(call))):
            answer["given"] = pack(given)
        return json.dumps(answer)
    except Exception as error:  # noqa: BLE001 - the program's, for the tests to see
        known = next(kind for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind)
        return json.dumps({"raised": [known.__name__, str(error)]})


def run_tests(test: str, entry: str, known: list[tuple[str, str | None]]) -> dict[str, Any]:
    """Run test code with the answers that are known; says which calls it needs, or what is at fault: the
    function (`fault`) or the test code itself (`broken`).

    Each time it draws the same random numbers.
    """
    answers = dict(known)
    foreseen = [] if known else literal_calls(test, entry)
    if foreseen:
        return {"needed": foreseen}
    needed: list[str] = []
    used: list[str] = []  # calls that the test code got an answer to
    raised: list[Exception] = []  # by the function

    def candidate(*args: Any, **named: Any) -> Any:
        try:
            call = json.dumps(pack((args, named)))
        except TypeError as error:
            raise TestFaultError(f"a call of {entry}: {error}") from None
        if call not in answers:
            needed.append(call)
            raise UnknownValueError
        used.append(call)
        try:
            return _value(answers[call], (*args, *named.values()))
        except Exception as error:
            raised.append(error)
            raise

    random.seed(0)
    try:
        exec(compile(test, "tests", "exec"), {"__name__": "tests", entry: candidate, "candidate": candidate})
    except UnknownValueError:
        return {"needed": needed}
    except TestFaultError as error:
        return {"broken": _told(error)}
    except Exception as error:  # noqa: BLE001 - any
        own = not used or (isinstance(error, ImportError) and error not in raised)
        what = "an assertion fails" if isinstance(error, AssertionError) else ""
        return {"broken" if own else "fault": _told(error, what)}
    return {} if used else {"broken": f"the test code never calls {entry}"}


def _told(error: BaseException, what: str = "") -> str:
    """Line on an error, whose text may be a program's: half a character is written as `?`."""
    return f"{what or type(error).__name__}: {error}".encode(errors="replace").decode()


def _value(answer: str | None, arguments: Iterable[Any]) -> Any:
    """The value of an answer; arguments become what they are after the call. Raises what the function raised."""
    if answer is None:
        raise RuntimeError("the function failed")
    given = json.loads(answer)
    if "raised" in given:
        name, text = given["raised"]
        kind = vars(builtins).get(name)
        raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(text)
    if "given" in given:
        args, named = unpack(given["given"])
        for before, after in zip(arguments, (*args, *named.values()), strict=True):
            if isinstance(before, list):
                before[:] = after
            elif isinstance(before, dict | set):
                before.clear()
                before.update(after)
    return unpack(given["value"])


def literal_calls(test: str, entry: str) -> list[str]:
    """Calls of the function whose arguments are literals, as test code mostly has them; each once."""
    found = dict[str, None]()
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (entry, "candidate"):
            try:
                args = tuple(ast.literal_eval(each) for each in node.args)
                named = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords if each.arg}
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue  # the test code computes them
            found[json.dumps(pack((args, named)))] = None
    return list(found)[:MOST_LITERAL]
