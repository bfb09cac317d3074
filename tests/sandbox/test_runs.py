"""Runs of programs that mean no harm."""

import asyncio

import msgspec
import pytest

from laminar_contrib.sandbox.inside.messages import SandboxLimits
from laminar_contrib.sandbox.records import SandboxLabel

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_input_and_files_come_in_and_output_and_exit_code_go_out(pool):
    result = await pool.run(
        "import sys, helper\nx = open('data/x').read()\n"
        "print(helper.double(int(input())), x, file=sys.stderr)\nsys.exit(3)",
        stdin="21\n",
        files={"helper.py": b"def double(x): return 2 * x", "data/x": b"y"},
    )
    assert (result.label, result.exit_code) == (SandboxLabel.ERROR, 3)
    assert (result.stdout, result.stderr) == ("", "42 y\n")


async def test_an_exception_is_shown_with_its_line_and_nothing_of_ours(pool):
    result = await pool.run("def f():\n    return 1 / 0\nf()")
    assert result.label is SandboxLabel.ERROR
    assert result.detail == "ZeroDivisionError: division by zero"
    assert "return 1 / 0" in result.stderr
    assert "laminar_" not in result.stderr


async def test_a_program_runs_as_a_script_does(pool):
    program = (
        "import sys, atexit, __main__\natexit.register(print, 'end')\nif __name__ == '__main__':\n    x = 1\n"
    )
    result = await pool.run(program + "print(__main__.x, sys.argv, file=sys.stdout)")
    assert (result.label, result.stdout) == (SandboxLabel.OK, "1 ['program.py']\nend\n")


@pytest.mark.parametrize(
    "module",
    [
        "asyncio",
        "sqlite3",
        "ssl",
        "hashlib",
        "lzma",
        "bz2",
        "multiprocessing",
        "xml.etree.ElementTree",
        "zoneinfo",
    ],
)
async def test_the_standard_library_is_there(pool, module):
    result = await pool.run(f"import {module}; print({module}.__name__)")
    assert result.stdout == f"{module}\n", result


async def test_an_event_loop_runs_inside(pool):
    result = await pool.run(
        "import asyncio\nasync def f():\n    await asyncio.sleep(0); print(1)\nasyncio.run(f())"
    )
    assert result.stdout == "1\n", result


async def test_a_function_is_called_and_its_value_comes_back_as_json(pool):
    program = "def add(a, b): return (a + b, {3}, None, 2**70, 'ü', {1: 0.5})"
    result = await pool.call(program, "add", [1, 2])
    assert result.label is SandboxLabel.OK
    assert msgspec.json.decode(result.value_json) == [3, {"a set of": [3]}, None, 2**70, "ü", {"1": 0.5}]


PLAIN_PYTHON = {
    "exit": "print(4)\nexit()\nprint(5)",
    "quit": "print(4)\nquit(0)",
    "stdin": "print(open('/dev/stdin').read().strip())",
    "path": "import pathlib\nprint(pathlib.Path('/dev/stdin').read_text().strip())",
    "stdout": "open('/dev/stdout', 'w').write('4\\n')",
    "pool": "from multiprocessing import Pool\nprint(*Pool(2).map(int, ['4']))",
    "process": "from multiprocessing import *\nq=Queue()\nProcess(None, q.put, None, [4]).start()\nprint(q.get())",
    "context": "from multiprocessing import get_context\nprint(get_context('spawn').Pool().apply(int, ['4']))",
    "executor": "from concurrent.futures import *\nwith ProcessPoolExecutor() as e: print(*e.map(int, ['4']))",
    "arguments": (
        "import multiprocessing as mp\nwith mp.Pool(1, maxtasksperchild=1) as p: p.map(int, '4')\n"
        "v = mp.Value('i')\ndef f():\n  with v.get_lock(): v.value += 4\n"
        "p = mp.Process(target=f, daemon=True)\np.start()\np.join()\n"
        "p.terminate()\nwith mp.Manager() as m: print(m.list([v.value])[0] + mp.Array('i', 1)[0])"
    ),
    "executor of contexts": (
        "import multiprocessing\nfrom concurrent.futures.process import ProcessPoolExecutor as E\n"
        "with E(1, mp_context=multiprocessing.get_context('fork')) as e: print(*e.map(int, ['4'], chunksize=2))"
    ),
    "mode": "import sys\nprint(4 if 'r' not in sys.stdout.mode and sys.stdin.mode == 'r' else 5)",
    "buffered": (
        "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint(4)"
    ),
    "open file": "file = open(1, 'w')\nfile.write('4\\n')",
    "without stdout": "import sys\nprint(4)\ndel sys.stdout",
    "zone": "import zoneinfo\nprint(4 if zoneinfo.ZoneInfo('UTC') else 5)",
}


@pytest.mark.parametrize("name", PLAIN_PYTHON)
async def test_a_program_finds_what_python_gives_a_script(pool, name):
    result = await pool.run(PLAIN_PYTHON[name], stdin="4\n")
    assert (result.label, result.stdout) == (SandboxLabel.OK, "4\n"), result


async def test_a_preamble_runs_before_the_program_whose_first_line_may_be_a_future_import(pool):
    program = "from __future__ import annotations\ndef f(x: Unknown): return helper(x)"
    result = await pool.call(program, "f", [2], preamble="def helper(x): return x + 1")
    assert (result.label, result.value_json) == (SandboxLabel.OK, "3"), result


async def test_a_method_is_called_of_an_object_made_for_it(pool):
    result = await pool.call("class Solution:\n    def f(self, x): return [x]", "Solution.f", ["a"])
    assert result.value_json == '["a"]'


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("x = 1", "NameError: the program defines no 'f'"),
        ("f = 1", "TypeError: 'f' of the program is no function"),
        ("def f(): return 'x' * 10**6", "more than 65536 bytes"),
        ("def f(): return float('x')", "ValueError: could not convert"),
        ("def f():\n    x = []; x.append(x); return x", "ValueError: Circular reference"),
        ("import os\ndef f(): os._exit(0)", ""),
    ],
)
async def test_a_call_without_a_value_says_why(pool, program, told):
    result = await pool.call(program, "f", [])
    assert result.value_json is None
    assert result.detail.startswith(told)


async def test_a_script_guarded_by_its_name_does_not_run_when_a_function_is_called(pool):
    result = await pool.call("def f(): return 1\nif __name__ == '__main__': input()", "f", [])
    assert result.value_json == "1", result


@pytest.mark.parametrize("program", ["print(1)\0", "Here it is:", "(" * 10_000, "x = '\ud800'; 1 / 0", ""])
async def test_what_is_no_program_is_an_error_of_its_own(pool, program):
    result = await pool.run(program)
    assert result.label is (SandboxLabel.ERROR if program else SandboxLabel.OK)


async def test_limits_of_one_run_are_its_own(pool):
    tight, wide = SandboxLimits(output_bytes=10), SandboxLimits(memory_bytes=1 << 30, file_bytes=32 << 20)
    program = "x = bytearray(300 << 20); open('f', 'wb').write(bytes(20 << 20)); print('x' * 99)"
    results = await asyncio.gather(*(pool.run(program, limits=limits) for limits in (tight, wide, None, wide)))
    assert [result.label is SandboxLabel.OK for result in results] == [False, True, False, True], results


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
async def test_a_file_may_not_lead_out(pool, name):
    with pytest.raises(ValueError, match="name a file below the program's folder"):
        await pool.run("", files={name: b""})


async def test_arguments_that_are_no_json_are_refused(pool):
    with pytest.raises(ValueError, match="args="):
        await pool.call("", "f", [object()])


async def test_more_runs_than_slots_wait_for_their_turn(pool):
    results = await asyncio.gather(*(pool.run(f"print({number})") for number in range(20)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(20)]


@pytest.mark.parametrize("field", ["cpu_s", "wall_s", "memory_bytes", "file_bytes", "output_bytes"])
async def test_a_limit_that_is_none_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0: give a number above 0"):
        SandboxLimits(**{field: 0})


LIBRARIES = """
import asyncio, concurrent.futures, decimal, os, shutil, sqlite3, tempfile, threading, zipfile
with tempfile.TemporaryDirectory() as folder:
    one = os.path.join(folder, "one")
    open(one, "w").write("text")
    shutil.copy(one, one + "2"); shutil.copy2(one, one + "3"); shutil.copytree(folder, folder + "-copy")
    with zipfile.ZipFile(one + ".zip", "w") as file: file.write(one, "one")
    zipfile.ZipFile(one + ".zip").extractall(folder + "-out")
    os.chmod(one, 0o600); os.utime(one)
    base = sqlite3.connect(one + ".db"); base.execute("create table t(x)"); base.commit(); base.close()
thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
asyncio.run(asyncio.sleep(0))
with concurrent.futures.ThreadPoolExecutor(2) as pool: print(list(pool.map(decimal.Decimal, [1, 2])))
"""


async def test_ordinary_programs_use_the_standard_library(pool):
    result = await pool.run(LIBRARIES)
    assert (result.label, result.stdout) == (SandboxLabel.OK, "[Decimal('1'), Decimal('2')]\n"), result
