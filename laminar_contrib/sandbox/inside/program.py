"""Run a program inside its fences: as a script, or a function of it, or the pieces of a session one by one.

This code shares its process with untrusted code, which can change all of it. So the owner trusts nothing important
in the report of the child.
"""

import ast
import atexit
import builtins
import contextlib
import io
import json
import linecache
import os
import resource
import signal
import site
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from laminar_contrib.sandbox.inside.messages import HEADER
from laminar_contrib.sandbox.inside.processes import use_threads
from laminar_py.children import exactly

NAME = "program.py"
_open_file = open
STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
DETAIL_CHARS = 400
SET = "a set of"  # key of an object that stands for a set in a returned value
SHOWN_CHARS = 16384  # of a traceback, which shows lines of the program


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPayload:
    """Input of a child, encoded as JSON. The bytes of its files follow it."""

    program: str
    preamble: str = ""  # runs before it, in its namespace
    function: str = ""
    args_json: str = "[]"
    files: dict[str, int] = field(default_factory=dict)  # name: size


@dataclass(slots=True, kw_only=True)
class Claim:
    """Report of a child about itself. A program can forge all of it."""

    detail: str = ""  # its exception
    value_json: str | None = None  # returned by the function that was called
    cpu_s: float = 0.0  # a call of a session


def read_payload(descriptor: int) -> tuple[ProgramPayload, dict[str, bytes]]:
    """Read the payload and its files, before any untrusted code runs."""
    with open(descriptor, "rb") as file:
        size = int.from_bytes(file.read(HEADER), "big")
        payload = ProgramPayload(**json.loads(file.read(size)))
        return payload, {name: file.read(number) for name, number in payload.files.items()}


def hide_own_modules() -> None:
    """Remove our modules from `sys.modules`. The zygote does it once, so that its children share those pages."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("laminar_py", "laminar_contrib")]:
        del sys.modules[name]


def complete_python() -> None:
    """Add what `python program.py` has: `exit`, `quit`, `help`, and a `multiprocessing` that runs threads."""
    for add in (site.setquit, site.setcopyright, site.sethelper):
        add()
    use_threads()


def run(payload: ProgramPayload, files: dict[str, bytes], *, report: int) -> int:
    """Run a program to its end, write the report to the descriptor `report`, and return the exit code."""
    _prepare(files)
    claim, first = Claim(), os.getpid()
    code = _run_guarded(claim, lambda: _execute(payload, claim))
    _end_threads()
    if os.getpid() == first:  # processes that the program forked reach this line, too
        _write_report(report, claim)
    return code


def converse(files: dict[str, bytes], calls: socket.socket, *, cpu_s: int) -> int:
    """Run the pieces of a session in one namespace, and answer each by its report, until the socket closes."""
    _prepare(files)
    space, first = _add_module("__main__").__dict__, os.getpid()
    while head := exactly(calls, HEADER):
        text = exactly(calls, int.from_bytes(head, "big"))
        if text is None:
            break
        code, claim, before = text.decode(), Claim(), _cpu_s()
        soft = int(before) + 1 + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        _run_guarded(claim, lambda code=code, claim=claim: _run_piece(code, space, claim))  # type: ignore[misc]
        _flush()
        if os.getpid() != first:  # a process that the code forked
            return 0
        claim.cpu_s = _cpu_s() - before
        answer = json.dumps(asdict(claim)).encode()
        calls.sendall(len(answer).to_bytes(HEADER, "big") + answer)
    return 0


def _execute(payload: ProgramPayload, claim: Claim) -> None:
    space = _add_module("solution" if payload.function else "__main__").__dict__
    _cache_lines(payload.program)
    exec(compile(payload.preamble, "preamble", "exec", dont_inherit=True), space)
    exec(compile(payload.program, NAME, "exec", dont_inherit=True), space)
    if payload.function:
        value = _find_function(space, payload.function)(*json.loads(payload.args_json))
        claim.value_json = json.dumps(value, default=_to_json)


def _run_piece(code: str, space: dict[str, object], claim: Claim) -> None:
    """Run a piece of a session. Print the value of an expression at its end, as a Python prompt does."""
    _cache_lines(code)
    tree = ast.parse(code, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NAME, "exec", dont_inherit=True), space)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), NAME, "eval", dont_inherit=True), space)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


def _run_guarded(claim: Claim, body: Callable[[], None]) -> int:
    """Run `body` and return its exit code. Write an exception to standard error and into the claim."""
    try:
        body()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        _show_error(str(end.code))
        return 1
    except BaseException as error:  # noqa: BLE001 - untrusted code raises anything
        with contextlib.suppress(BaseException):  # also in its texts
            claim.detail = " ".join(f"{type(error).__name__}: {error}".split())[:DETAIL_CHARS]
        with contextlib.suppress(BaseException):
            shown = traceback.TracebackException.from_exception(error)
            while shown.stack and shown.stack[0].filename == __file__:
                del shown.stack[0]
            _show_error("".join(shown.format())[-SHOWN_CHARS:])
        return 1
    return 0


def _prepare(files: dict[str, bytes]) -> None:
    """Write the files into the folder, and set up signals, standard streams and `sys.path`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # a file beyond its limit ends the program with this signal
    for name, content in files.items():
        os.makedirs(os.path.dirname(os.path.join(".", name)), exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(
        open(2, "wb", 0, closefd=False),  # noqa: SIM115
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    builtins.open = io.open = _open
    sys.argv = [NAME]
    sys.path.insert(0, os.getcwd())


def _open(file: Any, *args: Any, **named: Any) -> Any:
    """Open a file as `open` does; a path such as /dev/stdin is that stream, since the program cannot see /proc."""
    is_stream = isinstance(file, str | os.PathLike) and os.fspath(file) in STREAMS
    return _open_file(os.dup(STREAMS[os.fspath(file)]) if is_stream else file, *args, **named)


def _add_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    module.__dict__["__file__"] = NAME
    sys.modules[name] = module
    return module


def _cache_lines(code: str) -> None:
    """Let tracebacks show the lines of a program, which lies in no file."""
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)


def _find_function(space: dict[str, object], name: str) -> Callable[..., object]:
    """Find a function by name, e.g. "solve"; "Solution.solve" makes a `Solution()`.

    Raises `NameError`, `TypeError`.
    """
    first, *rest = name.split(".")
    if first not in space:
        raise NameError(f"the program defines no {first!r}")
    found = space[first]
    for part in rest:
        found = getattr(found() if isinstance(found, type) else found, part)
    if not callable(found):
        raise TypeError(f"{name!r} of the program is no function")
    return found


def _to_json(value: object) -> object:
    """Convert a value for JSON: a set to `{"a set of": [...]}`, an iterable to a list, others to their `repr`."""
    if isinstance(value, set | frozenset):
        return {SET: sorted(value, key=repr)}
    return list(value) if isinstance(value, Iterable) and not isinstance(value, bytes) else repr(value)


def _end_threads() -> None:
    """Join threads, run `atexit` functions and close open files, as an interpreter does at its end."""
    with contextlib.suppress(BaseException):  # untrusted code runs here and may raise anything
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    _flush()
    with contextlib.suppress(BaseException):
        sys.modules["__main__"].__dict__.clear()  # its open files are written and closed
    _flush()


def _flush() -> None:
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        with contextlib.suppress(BaseException):  # the program may have replaced the stream
            getattr(sys, name).flush()


def _show_error(text: str) -> None:
    with contextlib.suppress(BaseException):
        sys.stderr.write(text if text.endswith("\n") else text + "\n")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _write_report(descriptor: int, claim: Claim) -> None:
    with contextlib.suppress(BaseException):  # e.g. the program closed the descriptor; then there is no report
        os.write(descriptor, json.dumps(asdict(claim)).encode())
