"""The page of laws: every module and test that it names exists, and code cites only laws that stand on it."""

import ast
import re
from pathlib import Path

import pytest

from laminar_lab.audit.checks import Rule

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "laws.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.*?)\|$", PAGE, re.MULTILINE)
FINDINGS = re.findall(r"^\| (`.+?`) \| (\d+) \|$", PAGE, re.MULTILINE)


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_laws_are_numbered_from_1():
    assert [int(number) for number, *_ in ROWS] == list(range(1, len(ROWS) + 1))


@pytest.mark.parametrize(("number", "modules", "tests"), [(row[0], row[2], row[3]) for row in ROWS])
def test_a_law_names_modules_and_tests_that_exist(number, modules, tests):
    assert quoted(modules)
    assert quoted(tests)
    for module in quoted(modules):
        assert (ROOT / "laminar_py" / module).is_file() or (ROOT / module).is_file(), module
    for test in quoted(tests):
        path, name = test.split("::")
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        nodes = ast.parse((ROOT / path).read_text()).body
        assert name in {node.name for node in nodes if isinstance(node, kinds)}, test


LEFT_OUT = re.compile(r"mark\.(slow|gpu|sglang|adapters)\b")  # of `make test`


@pytest.mark.parametrize(("number", "tests"), [(row[0], row[3]) for row in ROWS])
def test_a_law_has_a_test_in_make_test(number, tests):
    assert any(not is_left_out(*test.split("::")) for test in quoted(tests)), f"every test of law {number} is slow"


def is_left_out(path, name):
    """True where a mark of the module or the test keeps it from `make test`; one of a parameter does not."""
    body = ast.parse((ROOT / path).read_text()).body
    marks = [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    for node in body:
        if getattr(node, "name", None) == name:
            marks += [mark for mark in node.decorator_list if "parametrize" not in ast.unparse(mark)]
    return any(LEFT_OUT.search(ast.unparse(mark)) for mark in marks)


def test_a_mark_of_the_test_or_its_module_leaves_it_out(tmp_path):
    module = tmp_path / "test_it.py"
    parameter = "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.slow)])"
    module.write_text(f"@pytest.mark.slow\ndef whole(): ...\n{parameter}\ndef part(): ...\n")
    assert is_left_out(module, "whole")
    assert not is_left_out(module, "part")
    module.write_text("pytestmark = [pytest.mark.sglang]\ndef whole(): ...\n")
    assert is_left_out(module, "whole")


def test_code_cites_only_laws_of_the_page():
    numbers = {number for number, *_ in ROWS}
    for path in ROOT.glob("laminar_*/**/*.py"):
        for cited in re.findall(r"\b[Ll]aws? (\d+)", path.read_text()):
            assert cited in numbers, f"{path} cites law {cited}"


def test_every_finding_of_the_audit_speaks_against_one_law():
    listed = sorted((name, int(number)) for names, number in FINDINGS for name in quoted(names))
    assert listed == sorted((rule.value, rule.law) for rule in Rule)
    assert {number for _, number in FINDINGS} <= {number for number, *_ in ROWS}
