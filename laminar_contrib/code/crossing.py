"""Both ends of a call from test code to the function that it tests, and the encoding of values between them.

This file runs inside two sandboxes, one with the program and one with the test code. So it imports only the
standard library. A value arrives as it left, e.g. a tuple as a tuple; values without a plain form raise
`TypeError`. If a function changes a list, dict or set among its arguments, the caller's object changes, too
(`tests/reward/test_code.py`).
"""

import ast
import builtins
import json
import random
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from itertools import accumulate
from typing import Any

MOST_CALLS = 1000  # of the function, by the tests of one problem
MOST_BYTES = 200_000  # of calls in one answer; encoded they may take four times as much, and an answer has 1 MiB
HOLDERS = (list, dict, set, deque, range, Iterator, KeysView, ValuesView, ItemsView)


class UnknownValueError(BaseException):
    """Ends a run of the test code at a call whose value is not known yet."""


class TestFaultError(BaseException):
    """Ends a run of the test code at a call whose arguments cannot be encoded."""


def _nothing(_: Any) -> None:
    """Let `pack` encode each container itself."""


def pack(value: Any, meet: Callable[[Any], Any] = _nothing) -> Any:
    """Encode a value for JSON. Raises `TypeError` for a value without a plain form.

    `meet` is called with each list, dict, set and iterator before its items, and may return another encoding of
    it.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
    if isinstance(value, tuple):
        return {"tuple": _pack_all(value, meet)}
    if isinstance(value, frozenset):
        return {"frozenset": _pack_all(sorted(value, key=repr), meet)}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if not isinstance(value, HOLDERS):
        raise TypeError(f"a value of type {type(value).__name__} has no plain form")
    if (form := meet(value)) is not None:
        return form
    if isinstance(value, dict):
        return {"dict": [[pack(key, meet), pack(of, meet)] for key, of in value.items()]}
    if isinstance(value, set):
        return {"set": _pack_all(sorted(value, key=repr), meet)}
    return _pack_all(value, meet)


def unpack(packed: Any, held: Sequence[Any] = ()) -> Any:
    """Decode a value; `{"at": 2}` stands for `held[2]`."""
    if isinstance(packed, list):
        return [unpack(each, held) for each in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "at":
        return held[content]
    if kind == "dict":
        return {unpack(key, held): unpack(of, held) for key, of in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    made: Callable[[Any], Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return made(unpack(content, held))


def _pack_all(values: Iterable[Any], meet: Callable[[Any], Any]) -> list[Any]:
    return [pack(each, meet) for each in values]


def answer_calls(function: Callable[..., Any], calls: list[str]) -> list[str]:
    """Call a function in the program's process and encode each answer, e.g. `[{"value": 4}, null]`.

    An answer is a pair. The first item is the value, or `{"raised": ["ValueError", "no"]}`. The second is null if
    the arguments are unchanged. Else it lists the new content of each list, dict and set, null if unchanged.
    """
    return [_answer_call(function, call) for call in calls]


def _answer_call(function: Callable[..., Any], call: str) -> str:
    """Call the program's function with decoded arguments; return its value or error, and changed arguments."""
    args, named = given = unpack(json.loads(call))
    held: list[Any] = []
    pack(given, held.append)
    before = _encode_contents(held)
    try:
        outcome = json.dumps({"value": pack(function(*args, **named))})
    except Exception as error:  # noqa: BLE001 - the program's, for the tests to see
        known = next(kind for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind)
        outcome = json.dumps({"raised": [known.__name__, str(error)]})
    try:
        after = _encode_contents(held)
    except Exception:  # noqa: BLE001 - something of the program's without a plain form was left in them
        after = before
    left = ", ".join("null" if new == old else new for old, new in zip(before, after, strict=True))
    return f"[{outcome}, {'null' if after == before else f'[{left}]'}]"


def _encode_contents(held: list[Any]) -> list[str]:
    """Encode the content of each container as JSON; a reference to another container becomes its index."""
    places = {id(each): {"at": place} for place, each in enumerate(held)}
    return [json.dumps(pack(each.copy(), lambda one: places.get(id(one)))) for each in held]


def run_tests(test: str, entry: str, known: list[tuple[str, str | None]]) -> dict[str, Any]:
    """Run test code with the answers known so far.

    Returns {} if it runs to its end, the calls that it needs (`needed`), or a fault of the function (`fault`) or
    of the test code itself (`broken`). Every run draws the same random numbers.
    """
    answers = dict(known)
    literal = literal_calls(test, entry)
    if len(literal) > MOST_CALLS:
        return {"broken": f"the test code calls {entry} more than {MOST_CALLS} times"}
    if foreseen := _first_calls(
        [call for call in literal if call not in answers and None not in answers.values()]
    ):
        return {"needed": foreseen}
    stops: list[dict[str, Any]] = []  # the first is the verdict, even if the test code catches it and continues
    used: list[str] = []  # calls that had an answer
    raised: list[Exception] = []  # errors of the function

    def candidate(*args: Any, **named: Any) -> Any:
        """Stand in for the program's function: return a known answer, or stop the tests and request the call."""
        held: list[Any] = []
        try:
            call = json.dumps(pack((args, named), held.append))
        except TypeError as error:
            stops.append({"broken": f"a call of {entry}: {error}"})
            raise TestFaultError from None
        if call not in answers:
            stops.append({"needed": [call]})
            raise UnknownValueError
        used.append(call)
        try:
            return _decode_answer(answers[call], held)
        except Exception as error:
            raised.append(error)
            raise

    random.seed(0)
    try:
        exec(compile(test, "tests", "exec"), {"__name__": "tests", entry: candidate, "candidate": candidate})
        end = {} if used else {"broken": f"the test code never calls {entry}"}
    except BaseException as error:  # noqa: BLE001 - any
        own = (
            not used
            or (isinstance(error, ImportError) and error not in raised)
            or not isinstance(error, Exception)
        )
        what = "an assertion fails" if isinstance(error, AssertionError) else ""
        end = {"broken" if own else "fault": _describe_error(error, what)}
    return stops[0] if stops else end


def _describe_error(error: BaseException, what: str = "") -> str:
    """Describe an error in one text. A program may have made its message, so replace broken characters by `?`."""
    return f"{what or type(error).__name__}: {error}".encode(errors="replace").decode()


def _decode_answer(answer: str | None, held: list[Any]) -> Any:
    """Decode an answer and update the arguments `held` as the call did; raise the error that the call raised."""
    if answer is None:
        raise RuntimeError("the program's function gave no answer")
    outcome, after = json.loads(answer)
    for each, form in zip(held, after or [None] * len(held), strict=True):
        if form is None or not isinstance(each, list | dict | set | deque):
            continue
        content = unpack(form, held)
        each.clear()
        each.extend(content) if isinstance(each, list | deque) else each.update(content)
    if "raised" in outcome:
        name, text = outcome["raised"]
        kind = vars(builtins).get(name)
        raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(text)
    return unpack(outcome["value"])


def literal_calls(test: str, entry: str) -> list[str]:
    """List calls of the function in test code whose arguments are literals; each once."""
    found = dict[str, None]()
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (entry, "candidate"):
            try:
                args = tuple(ast.literal_eval(each) for each in node.args)
                named = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords if each.arg}
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue  # the test code computes them
            found[json.dumps(pack((args, named)))] = None
    return list(found)


def _first_calls(calls: list[str]) -> list[str]:
    """Return the first calls, as many as fit into one answer, but at least one."""
    sizes = accumulate(map(len, calls))
    return [
        call for place, (call, size) in enumerate(zip(calls, sizes, strict=True)) if not place or size < MOST_BYTES
    ]
