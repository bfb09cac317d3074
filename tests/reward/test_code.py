"""The reward `code`: programs against tests of every form, in the real sandbox."""

import json
import time

import pytest

from laminar_contrib.code.crossing import pack, unpack
from laminar_contrib.code.term import (
    CodeTerm,
    fault_in_tests,
    find_program,
    read_tests,
    same_output,
    same_value,
)
from laminar_py.records.trajectory import DropReason, Prompt
from tests.reward.requests import make_request
from tests.reward.test_scorer import score, scorer_of

DOUBLE = "def f(x):\n    return 2 * x"
FUNCTION = {"fn_name": "f", "inputs": [[2], [5]], "outputs": [4, 10]}
PRINTED = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}
ASSERTED = {"entry_point": "f", "asserts": ["assert f(2) == 4", "assert abs(f(2.5) - 5) < 1e-6"]}
CHECKED = {
    "entry_point": "pair",
    "asserts": [
        "def check(candidate):",
        " for i in range(3):",
        "  assert candidate(i) == (i, [i])",
        "check(pair)",
    ],
}


def request_of(program: str, tests: dict, *, index: int = 0):
    response = f"<think>```python\nraise SystemExit\n```</think>Here:\n```python\n{program}\n```"
    return make_request(response, index=index, fields_json=json.dumps({"tests": tests}).encode())


async def scores_of(folder, *requests, **term):
    async with scorer_of(folder, {"use": [{"kind": "code"} | term]}) as scorer:
        return await score(scorer, *requests)


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (DOUBLE, FUNCTION),
        ("print(2 * int(input()))", PRINTED),
        (DOUBLE, ASSERTED),
        ("def pair(i):\n    return i, [i]", CHECKED),
        ("class Solution:\n    def f(self, x):\n        return 2 * x", FUNCTION | {"fn_name": "Solution.f"}),
    ],
)
async def test_a_right_program_passes_and_a_wrong_one_is_told_its_first_failure(tmp_path, program, tests):
    wrong = program.replace("2 * ", "3 * ").replace("i, [i]", "i, [0]")
    right, other = await scores_of(tmp_path, request_of(program, tests), request_of(wrong, tests, index=1))
    assert (right.value, right.terms[0].text) == (1.0, "")
    assert other.value == 0.0
    assert other.terms[0].text


async def test_partial_credit_is_the_share_of_the_tests_that_pass(tmp_path):
    program = "def f(x):\n    return 4 if x == 2 else x.y"
    (found,) = await scores_of(tmp_path, request_of(program, FUNCTION), partial=True)
    assert found.value == 0.5
    assert found.terms[0].text.startswith("test 2: f(5): error: AttributeError")


async def test_a_program_that_keeps_state_between_calls_is_judged_by_fresh_runs(tmp_path):
    counts = "seen = []\ndef f(x):\n    seen.append(x)\n    return 2 * x * len(seen)"
    shares = "kept = [0]\ndef f(x):\n    kept[0] = 2 * x\n    return kept"
    lists = {"fn_name": "f", "inputs": [[2], [5]], "outputs": [[4], [10]]}
    requests = request_of(counts, FUNCTION), request_of(shares, lists, index=1)
    assert [found.value for found in await scores_of(tmp_path, *requests)] == [1.0, 1.0]


async def test_more_tests_than_are_tried_together_are_all_counted(tmp_path):
    many = {"fn_name": "f", "inputs": [[x] for x in range(40)], "outputs": [2 * x for x in range(40)]}
    program = "def f(x):\n    return 2 * x if x != 33 else 0"
    (found,) = await scores_of(tmp_path, request_of(program, many), partial=True)
    assert (found.value, found.terms[0].text) == (39 / 40, "test 34: f(33) returned 0, wanted 66")


async def test_tests_after_one_that_is_out_of_time_are_not_waited_for(tmp_path):
    tests = {"fn_name": "f", "inputs": [[x] for x in range(40)], "outputs": [2 * x for x in range(40)]}
    program = "def f(x):\n    while x > 9: pass\n    return 2 * x if x else 1"
    async with scorer_of(tmp_path, {"use": [{"kind": "code", "partial": True}]}, sandbox={"cpu_s": 1}) as scorer:
        (found,) = await score(scorer, request_of(program, tests))
    assert (found.value, found.terms[0].text) == (9 / 40, "test 1: f(0) returned 1, wanted 0")


VIOLATIONS = {
    "time": "def f(x):\n    while True: pass",
    "error: MemoryError": "def f(x):\n    return 'a' * 10**10",
    "error: PermissionError": "def f(x):\n    return open('/etc/passwd').read()",
    "crash": "def f(x):\n    import ctypes\n    ctypes.string_at(0)",
    "error": "def f(",
}


async def test_a_violation_is_a_label_and_no_failed_reward(tmp_path):
    programs = enumerate(VIOLATIONS.values())
    async with scorer_of(tmp_path, {"use": ["code"]}, sandbox={"cpu_s": 1}) as scorer:
        found = await score(scorer, *(request_of(program, FUNCTION, index=index) for index, program in programs))
    for one, label in zip(found, VIOLATIONS, strict=True):
        assert (one.value, one.failure) == (0.0, None)
        assert one.terms[0].text.startswith(f"test 1: f(2): {label}:")


FORGERIES = {
    "every descriptor": """
import os
def f(x):
    for fd in range(64):
        try: os.write(fd, b'ok 4 true')
        except OSError: pass
""",
    "exit code": "import os\nos._exit(0)",
    "equality": """
class Any(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Any(7)
""",
    "assertions": """
import builtins
builtins.AssertionError = type('Never', (BaseException,), {})
def f(x): return 7
""",
    "nested": """
import json, os
def f(x):
    text = '[' * 200000
    for fd in range(3, 9):
        try: os.write(fd, json.dumps({'finished': True, 'value_json': text}).encode())
        except OSError: pass
    os._exit(0)
""",
    "exit": "def f(x):\n    raise SystemExit(0)",
}


async def test_no_program_forges_its_verdict(tmp_path):
    cases = [(name, tests) for name in FORGERIES for tests in (FUNCTION, ASSERTED)]
    requests = [request_of(FORGERIES[name], tests, index=index) for index, (name, tests) in enumerate(cases)]
    found = await scores_of(tmp_path, *requests)
    assert [name for (name, _), one in zip(cases, found, strict=True) if one.value != 0.0] == []


@pytest.mark.parametrize(
    ("tests", "fault"),
    [
        (None, "no `tests` among its fields (test, level)"),
        (3, "`tests` cannot be read: Expected `object`, got `int`"),
        ({}, "`tests` has neither `inputs` nor `asserts`"),
        (FUNCTION | {"outputs": [4]}, "`tests` has 2 inputs and 1 outputs"),
        (FUNCTION | {"inputs": [2, 5]}, "`tests.inputs` has arguments that are no list"),
        ({"inputs": [[2]], "outputs": [4]}, "standard input or output that is no text; give `fn_name`"),
        (ASSERTED | {"asserts": "assert f(2 == 4"}, "`tests.asserts` does not parse ("),
        (
            ASSERTED | {"asserts": "def g():\n    assert f(2) == helper(2)"},
            "`tests.asserts` uses 'helper', which it does",
        ),
        (FUNCTION | {"fn_name": "f;import os"}, "`tests.fn_name` is 'f;import os', no name of a function"),
        (ASSERTED | {"asserts": "assert f(2) == " + "-" * 200_000 + "1"}, "`tests.asserts` does not parse"),
        (ASSERTED | {"entry_point": "f()"}, "`tests.entry_point` is 'f()', no name of a function"),
    ],
)
def test_tests_that_cannot_be_run_are_explained(tests, fault):
    fields = b'{"test": {}, "level": 1}' if tests is None else json.dumps({"tests": tests}).encode()
    problem = Prompt(id="p0", index=0, text="", ids=None, fields_json=fields)
    assert fault in fault_in_tests(CodeTerm(), problem)


@pytest.mark.parametrize("tests", [FUNCTION, PRINTED, ASSERTED, CHECKED])
def test_tests_of_every_form_are_taken(tests):
    fields = json.dumps({"tests": tests, "level": 3}).encode()
    assert fault_in_tests(CodeTerm(), Prompt(id="p0", index=0, text="", ids=None, fields_json=fields)) is None


PROMPTED = {
    "imports": ("def f(x: List[int]) -> int: return max(x)", {"inputs": [[[1, 4]]], "outputs": [4]}),
    "solution": (
        "class Solution:\n  def f(self, x: Optional[int]) -> int: return gcd(x, 12)",
        {"fn_name": "Solution.f", "inputs": [[4]], "outputs": [4]},
    ),
    "method": (
        "class Solution:\n  def f(self, x: int) -> int: return self.twice(x)\n  def twice(self, x): return 2 * x",
        {"inputs": [[2], [3]], "outputs": [4, 6]},
    ),
    "standard input": (
        "print(helper(int(input())))",
        {"fn_name": "", "preamble": "def helper(x): return 2 * x", "inputs": ["2"], "outputs": ["4"]},
    ),
    "deque": ("def f(x): return deque([x])", {"inputs": [[2]], "outputs": [[2]]}),
    "script with a class": (
        "class Solution:\n  def f(self): print(2 * int(input()))\nSolution().f()",
        {"fn_name": "", "inputs": ["2"], "outputs": ["4"]},
    ),
    "method under asserts": (
        "class Solution:\n  def f(self, x): return 2 * x",
        {"entry_point": "f", "asserts": "assert f(2) == 4"},
    ),
    "helper": (
        "def f(x): return helper(x)",
        {"preamble": "def helper(x): return 2 * x", "inputs": [[2]], "outputs": [4]},
    ),
    "set": ("def f(x): return {x, 10}", {"inputs": [[9], [9], [11]], "outputs": [[9, 10], [10, 9], [10, 11]]}),
    "asserts": (
        "def f(x: List[int]): return helper(x)",
        {"preamble": "def helper(x): return x[0]", "entry_point": "f", "asserts": "assert f([4]) == 4"},
    ),
}


@pytest.mark.parametrize("name", PROMPTED)
async def test_a_program_may_rely_on_what_its_prompt_gave(tmp_path, name):
    program, tests = PROMPTED[name]
    tests = tests if "asserts" in tests else {"fn_name": "f"} | tests
    (found,) = await scores_of(tmp_path, request_of(program, tests))
    assert (found.value, found.terms[0].text) == (1.0, "")


async def test_the_order_of_a_set_says_nothing_and_that_of_a_list_does(tmp_path):
    tests = {"fn_name": "f", "inputs": [[9]], "outputs": [[10, 9]]}
    ordered, larger = await scores_of(
        tmp_path,
        request_of("def f(x): return [x, 10]", tests),
        request_of("def f(x): return {x, 10, 11}", tests, index=1),
    )
    assert (ordered.value, larger.value) == (0.0, 0.0)


async def test_a_call_stands_in_the_record_as_a_person_writes_it(tmp_path):
    called = {"fn_name": "f", "inputs": [[[4.0, 9.0], "a"]], "outputs": [1]}
    asserted = {"entry_point": "f", "asserts": "assert f([4.0, (9, None)], key='a') == 1"}
    wrong, broken = await scores_of(
        tmp_path,
        request_of("def f(x, key): return 2", called),
        request_of("import os\ndef f(x, key): os._exit(3)", asserted, index=1),
    )
    assert wrong.terms[0].text == "test 1: f([4.0, 9.0], 'a') returned 2, wanted 1"
    assert "f([4.0, (9, None)], key='a')" in broken.terms[0].text


FENCED = {
    "indented": "1. Here:\n   ```python\n   def f():\n       return 1\n   ```\n2. Done.",
    "tildes": "~~~python\ndef f():\n    return 1\n~~~\nThis is it.",
    "open": "So:\n```python\ndef f():\n    return 1",
    "none, indented": "    def f():\n        return 1\n",
    "upper case": "```Python\ndef f():\n    return 1\n```",
    "longer": "````python\ndef f():\n    return 1\n````",
    "attributes": "```python title='a.py'\ndef f():\n    return 1\n```",
}


@pytest.mark.parametrize("name", FENCED)
def test_a_fenced_block_is_found_however_it_is_fenced(name):
    assert find_program(FENCED[name], "f") == "def f():\n    return 1\n"


def test_fences_inside_a_program_do_not_end_it():
    comment = "def f():\n    # use ``` here\n    return 1\n"
    docstring = 'def f():\n    """Example:\n    ```\n    f()\n    ```\n    """\n    return 1\n'
    for program in (comment, docstring):
        assert find_program(f"```python\n{program}```\nThis is it.", "f") == program


@pytest.mark.parametrize("piece", ["`", "`~", "```\n", "```python\n", "```a\n", "x```\n", " ~~~\n`"])
def test_the_cost_of_a_long_response_is_bounded(piece):
    started = time.process_time()
    find_program(piece * 50_000, "f")
    assert time.process_time() - started < 5


def test_a_block_that_the_next_one_closes_is_no_part_of_it():
    assert find_program("```python\na = 1\n```python\ndef f(): return 1\n```", "f") == "def f(): return 1\n"


def test_the_last_block_after_the_thinking_is_the_program():
    assert find_program("<think>```\na\n```</think>text ```py\nb\n``` and\n```python\nc = 1\n```.") == "c = 1\n"
    assert find_program("no block") == "no block"
    assert find_program("```python\na = 1\n```\nprints\n```\n1\n```") == "a = 1\n"


@pytest.mark.parametrize("wanted", ["f", "f.method"])
@pytest.mark.parametrize("solution", ["def f(x): return x", "class f: pass", "from math import sqrt as f"])
@pytest.mark.parametrize("example", ["print(f(1))", "def g(): return f(1)", "def f(: ...", "s = '\\d'", "\0"])
def test_the_last_block_that_defines_the_function_is_the_program(wanted, solution, example):
    blocks = [f"```python\n{example}\n```", f"```\n{solution}\n```"]
    for text in (blocks, blocks[::-1]):
        assert find_program("Final:\n".join(text), wanted) == f"{solution}\n"
    assert find_program(f"```text\n{solution}\n```\n{blocks[0]}", wanted) == f"{example}\n"


def test_a_block_that_only_imports_the_function_is_an_example_and_a_class_solution_is_none():
    solution = "class Solution:\n    def f(self): return 1\n"
    for program in ("def f(): return 1\n", solution):
        assert (
            find_program(f"```python\n{program}```\n```python\nfrom a import f\nprint(f())\n```", "f") == program
        )
    assert find_program(f"```python\n{solution}```\n```python\nprint(Solution().f())\n```", "f") == solution


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("4 \n5\n\n", "4\n5", True),
        ("\n4\n5\n", "4\n5", True),
        ("4 5", "4\n5", False),
        ("0.3333333", "0.33333333", True),
        ("3", "4", False),
        ("1000001", "1000000", False),
        ("YES", "yes", False),
    ],
)
def test_printed_text_is_compared_line_by_line_with_decimals_near(printed, wanted, same):
    assert same_output(printed, wanted) is same


@pytest.mark.parametrize(
    ("value", "wanted", "same"),
    [
        (1, True, False),
        (1.0, 1, True),
        (10**17, 10**17 + 1, False),
        (0.1 + 0.2, 0.3, True),
        ([1, [2.0]], [1, [2]], True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, 0, False),
        ("1", 1, False),
        (10**400, 1.5, False),
    ],
)
def test_values_are_equal_as_json_is_with_floats_near(value, wanted, same):
    assert same_value(value, wanted) is same


def test_sets_are_compared_by_their_members_fast_and_at_any_depth():
    numbers = list(range(15_000))
    started = time.process_time()
    assert same_value({"a set of": sorted(numbers, key=repr)}, numbers)
    assert time.process_time() - started < 2
    assert same_value({"a set of": [0.1 + 0.2, [1.0, 2], "a", None]}, ["a", None, [1, 2], 0.3])
    assert not same_value({"a set of": [1, 1]}, [1])
    assert not same_value({"a set of": [True]}, [1])
    nested = []
    for _ in range(2000):
        nested = [nested]
    assert not same_value({"a set of": [nested]}, [4])


def test_long_output_is_compared_at_once():
    assert not same_output("1" * 1_000_000 + "x", "5")
    assert not same_output("1." + "1" * 1_000_000, "1.5")


EXACT = {
    "def f(a): return 2 * a": [
        "import random",
        "for _ in range(3):",
        "    x = random.random()",
        "    assert f(x) == 2 * x",
    ],
    "def f(a): return a, [a]": ["assert f(2) == (2, [2])", "assert f(2) != [2, [2]]", "assert f(a=2)[0] == 2"],
    "def f(a): return {1: a}": ["assert f(2) == {1: 2}", "assert f(frozenset({3})) == {1: {3}}"],
    "def f(a): return [(1, a)]": ["assert set(f(2)) == {(1, 2)}", "assert f(float('inf')) == [(1, float('inf'))]"],
    "def f(a, b): a.sort(); b['n'] = a.pop()": [
        "a, b = [3, 1], {}",
        "f(a, b=b)",
        "assert (a, b) == ([1], {'n': 3})",
    ],
    "def f(a): return int(a)": [
        "try:",
        "    f('x')",
        "except ValueError as error:",
        "    assert 'invalid literal' in str(error)",
        "else:",
        "    assert False",
    ],
}


LEFT = {
    "def f(a): n = len(a); a[:] = [object() for _ in a]; return n": ["assert f([1, 2]) == 2"],
    "def f(a): n = len(a); a.append(a); return n": ["a = [1]", "assert f(a) == 1", "assert a[1] is a"],
    "def f(a): a[0], a[1] = float(a[0]), bool(a[1])": ["a = [1, 1]", "f(a)", "assert repr(a) == '[1.0, True]'"],
    "def f(a): a.append(9); raise ValueError": [
        "a = [1]",
        "try: f(a)",
        "except ValueError: pass",
        "assert a == [1, 9]",
    ],
    "def f(t): t[0].append(1); t[1]['k'].add(2)": [
        "t, = [([0], {'k': set()})]",
        "f(t)",
        "assert t == ([0, 1], {'k': {2}})",
    ],
    "def f(a): a.sort(); a[0].append(7)": [
        "r, s = [1], [2]",
        "a = [s, r]",
        "f(a=a)",
        "assert (r, s) == ([1, 7], [2])",
        "assert a[0] is r and a[1] is s",
    ],
    "def f(d): d.append(d.pop(0))": [
        "from collections import deque",
        "d = deque([1, 2])",
        "f(d)",
        "assert d[0] == 2",
    ],
}


SWALLOWED = [
    "for x in (1, 2):\n    try: ok = f(x) == 2 * x\n    except: ok = False\n    assert ok",
    "assert f(0) == 0\nfor x in (1, 2):\n    try: r = f(x)\n    except: r = None\n    assert r == 2 * x",
    "x = 1\ntry: r = f(x)\nexcept:\n    import sys\n    sys.exit(0)\nassert r == 2",
    "def g():\n    try: return f(*[2])\n    finally: return 4\nassert f(1) == 2 and g() == 4",
]


async def test_no_verdict_is_given_on_calls_that_were_not_made(tmp_path):
    wrong = "def f(x):\n    return 3 * x"
    cases = [(program, asserts) for asserts in SWALLOWED for program in (DOUBLE, wrong)]
    requests = [
        request_of(program, {"entry_point": "f", "asserts": asserts}, index=index)
        for index, (program, asserts) in enumerate(cases)
    ]
    found = await scores_of(tmp_path, *requests)
    assert [(one.value, one.detail) for one in found] == [(1.0, ""), (0.0, "")] * len(SWALLOWED)


async def test_a_call_that_cannot_be_made_is_told_though_the_tests_swallow_it(tmp_path):
    tests = {"entry_point": "f", "asserts": "assert f(2) == 4\ntry: f(object())\nexcept: pass"}
    (found,) = await scores_of(tmp_path, request_of(DOUBLE, tests))
    assert (found.value, found.failure) == (None, DropReason.REWARD_FAILED)
    assert "a value of type object has no plain form" in found.detail


async def test_assertions_see_values_and_exceptions_and_arguments_as_the_function_left_them(tmp_path):
    cases = [*EXACT.items(), *LEFT.items()]
    requests = [
        request_of(program, {"entry_point": "f", "asserts": asserts}, index=index)
        for index, (program, asserts) in enumerate(cases)
    ]
    found = await scores_of(tmp_path, *requests)
    texts = [one.detail or one.terms[0].text for one in found]
    assert [(case, text) for case, text in zip(cases, texts, strict=True) if text] == []
    assert [one.value for one in found] == [1.0] * len(cases)


async def test_a_call_that_takes_its_process_down_fails_alone(tmp_path):
    program = "import os\ndef f(x):\n    return x if x < 3 else os._exit(1)"
    passes, fails = {"entry_point": "f", "asserts": "assert f(1) == 1"}, ["assert f(2) == 2", "assert f(3) == 3"]
    fails = {"entry_point": "f", "asserts": fails}
    good, bad = await scores_of(tmp_path, request_of(program, passes), request_of(program, fails, index=1))
    assert (good.value, bad.value) == (1.0, 0.0)
    assert "the program's function gave no answer" in bad.terms[0].text


@pytest.mark.parametrize(
    "value", [(1, [2, {3}]), {"a": {2: None}}, b"\x00a", 2j, frozenset({(1,)}), float("-inf"), ""]
)
def test_values_cross_as_they_are(value):
    assert repr(unpack(json.loads(json.dumps(pack(value))))) == repr(value)


def test_what_has_no_plain_form_is_refused_by_name():
    with pytest.raises(TypeError, match="a value of type object has no plain form"):
        pack([object()])


@pytest.mark.parametrize(
    ("asserts", "words"),
    [
        ("import numpy\nassert f(2) == 4", "ModuleNotFoundError"),
        ("while True: pass\nf(2)", "time: "),
        ("assert f(object()) == 4", "a value of type object has no plain form"),
        ("\n".join(f"assert f({x}) == {2 * x}" for x in range(1001)), "calls f more than 1000 times"),
        ("x = [1]\nx.nosuch()\nassert f(2) == 4", "AttributeError: 'list' object has no attribute 'nosuch'"),
        ("def check(candidate):\n    assert candidate(2) == 5", "never calls f"),
    ],
)
async def test_what_the_tests_are_to_blame_for_is_no_zero(tmp_path, asserts, words):
    tests = {"entry_point": "f", "asserts": asserts}
    async with scorer_of(tmp_path, {"use": ["code"]}, sandbox={"cpu_s": 1}) as scorer:
        (found,) = await score(scorer, request_of(DOUBLE, tests))
    assert (found.value, found.failure) == (None, DropReason.REWARD_FAILED)
    assert words in found.detail


BLAMED_ON_THE_PROGRAM = {
    "def f(x): raise ImportError('x')": "ImportError: x",
    "def f(x):\n    import numpy\n    return 2 * x": "ModuleNotFoundError: No module named 'numpy'",
    "def f(x): raise ValueError('\\ud800')": "ValueError: ",
}


async def test_what_the_program_is_to_blame_for_is_zero(tmp_path):
    blamed = enumerate(BLAMED_ON_THE_PROGRAM)
    found = await scores_of(tmp_path, *(request_of(program, ASSERTED, index=index) for index, program in blamed))
    for one, text in zip(found, BLAMED_ON_THE_PROGRAM.values(), strict=True):
        assert (one.value, one.failure) == (0.0, None)
        assert one.terms[0].text.startswith(text)


async def test_a_program_cannot_have_no_value_by_leading_the_tests_to_more_calls(tmp_path, monkeypatch):
    monkeypatch.setattr("laminar_contrib.code.term.MOST_CALLS", 20)
    tests = {"entry_point": "f", "asserts": "x = 0\nwhile f(x) != 4: x += 1"}
    right, constant = await scores_of(
        tmp_path, request_of(DOUBLE, tests), request_of("def f(x): return 0", tests, index=1)
    )
    assert (right.value, constant.value) == (1.0, 0.0)
    assert constant.terms[0].text == "calls: the tests call f more than 20 times"


async def test_calls_after_one_that_is_out_of_time_are_made_only_where_the_tests_need_them(tmp_path):
    program = "def f(x):\n    while x == 1: pass\n    while x > 2: pass\n    return x"
    never = "if f(0): f(1)\nassert f(2) == 2"
    many = "\n".join(f"assert f({x}) == {x}" for x in range(40))
    requests = [
        request_of(program, {"entry_point": "f", "asserts": asserts}, index=index)
        for index, asserts in enumerate((never, many))
    ]
    term = {"kind": "code", "timeout_s": 45}
    async with scorer_of(tmp_path, {"use": [term]}, sandbox={"cpu_s": 1, "slots": 2}) as scorer:
        first, second = await score(scorer, *requests)
    assert (first.value, second.value, second.failure) == (1.0, 0.0, None)
    assert "(f" in second.terms[0].text


async def test_as_many_literal_calls_as_are_allowed_are_made_together(tmp_path):
    asserts = "\n".join(f"assert f({x}) == {2 * x}" for x in range(1000))
    (found,) = await scores_of(tmp_path, request_of(DOUBLE, {"entry_point": "f", "asserts": asserts}))
    assert (found.value, found.detail) == (1.0, "")


@pytest.mark.parametrize("letter", ["x", '"', "\\"])
async def test_calls_of_more_bytes_than_one_answer_has_are_made_in_turns(tmp_path, letter):
    asserts = "\n".join(f"assert f({str(x) + letter * 3000!r}) == {str(x)!r}" for x in range(400))
    program = f"def f(x):\n    return x.rstrip({letter!r})"
    (found,) = await scores_of(tmp_path, request_of(program, {"entry_point": "f", "asserts": asserts}))
    assert (found.value, found.detail) == (1.0, "")


@pytest.mark.parametrize(
    ("asserts", "words"),
    [
        ("import numpy.linalg\nassert f(1) == 1", "imports 'numpy', which the sandbox does not have"),
        ("from . import other\nassert f(1) == 1", "imports '.', which"),
    ],
)
def test_tests_that_import_packages_are_refused_at_load(asserts, words):
    fields = json.dumps({"tests": {"entry_point": "f", "asserts": asserts}}).encode()
    assert words in fault_in_tests(CodeTerm(), Prompt(id="p0", index=0, text="", ids=None, fields_json=fields))


def test_tests_may_try_to_import_packages():
    asserts = "try:\n    import numpy\nexcept ImportError:\n    pass\nr = f()\nr.sort()\nassert f(1).items()"
    fields = json.dumps({"tests": {"entry_point": "f", "asserts": asserts}}).encode()
    assert fault_in_tests(CodeTerm(), Prompt(id="p0", index=0, text="", ids=None, fields_json=fields)) is None


@pytest.mark.parametrize("form", [FUNCTION, PRINTED, ASSERTED])
def test_a_null_among_the_tests_counts_as_absent(form):
    filled = dict.fromkeys(("fn_name", "inputs", "outputs", "asserts", "entry_point", "preamble")) | form
    fields = json.dumps({"tests": filled}).encode()
    assert fault_in_tests(CodeTerm(), Prompt(id="p", index=0, text="", ids=None, fields_json=fields)) is None
    assert read_tests(fields) == read_tests(json.dumps({"tests": form}).encode())


@pytest.mark.parametrize(
    ("outputs", "program", "value"),
    [
        ([[4], [10]], DOUBLE, 1.0),
        ([[4], [10]], "def f(x):\n    return [2 * x]", 1.0),
        ([[4], [10]], "def f(x):\n    return 3 * x", 0.0),
        ([[4], [10, 11]], "def f(x):\n    return 4 if x == 2 else [10, 11]", 0.0),
        ([[4], 10], DOUBLE, 0.0),
    ],
)
async def test_outputs_that_are_all_lists_of_one_value_are_read_as_apps_graders_do(
    tmp_path, outputs, program, value
):
    (found,) = await scores_of(tmp_path, request_of(program, FUNCTION | {"outputs": outputs}))
    assert found.value == value
