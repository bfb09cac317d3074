"""The rule of the room: each record's docstring has a worked example, which names the record."""

import ast
from pathlib import Path

import laminar_py.records

BASES = {"VersionSpan", "BaseTrajectory", "Event"}  # of records with examples
SHOWN_BY_ITS_FIELDS = {"MicroBatch"}  # whose example is arrays
FILES = sorted(Path(laminar_py.records.__file__).parent.glob("*.py"))


def is_record(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        "frozen=True" in ast.unparse(option) or (isinstance(option, ast.keyword) and option.arg == "frozen")
        for option in (*node.keywords, *node.decorator_list)
    )


def test_each_record_has_a_worked_example():
    records = [node for file in FILES for node in ast.walk(ast.parse(file.read_text())) if is_record(node)]
    bare = {node.name for node in records if f"`{node.name}(" not in (ast.get_docstring(node) or "")}
    assert len(records) > 70
    assert bare == BASES | SHOWN_BY_ITS_FIELDS
