"""Environments of a few tools, and turns of a model that calls them."""

import json

import pytest

from laminar_contrib.tools.call_formats import CallFamily
from laminar_contrib.tools.kind import ToolSettings
from laminar_contrib.tools.tool_environment import CallTurns, ToolEnvironment, load_tools

OWN_TOOLS = '''
import asyncio
import time

last = []

def add(a: int, b: int = 1) -> int:
    """Sum of two numbers."""
    return a + b

def flood(size: int) -> str:
    return "x" * size

def table(rows: int) -> list[dict[str, float]]:
    return [{"row": row / 2} for row in range(rows)]

def broken(reason: str) -> str:
    raise RuntimeError(reason)

def leave(code: int) -> str:
    raise SystemExit(code)

def exhausted(number: int) -> str:
    return next(iter([]))

def odd(number: int) -> object:
    return object() if number else 10**5000

def surrogate(number: int) -> str:
    return chr(0xD800 + number)

async def late(order: int) -> int:
    await asyncio.sleep(0.05 * (3 - order))
    last.append(order)
    return order

def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "done"

def untyped(a, b: int = 1):
    return a
'''


@pytest.fixture
def own_tools(tmp_path):
    """The file above."""
    path = tmp_path / "own.py"
    path.write_text(OWN_TOOLS)
    return path


@pytest.fixture
def environment_of(own_tools):
    """An environment with tools by their names, those of the file above with a colon in front."""

    def make(*names, family="hermes", **settings):
        use = [f"{own_tools}{name}" if name.startswith(":") else name for name in names]
        chosen = ToolSettings(use=use, family=CallFamily(family), **settings)
        tools = load_tools(chosen)
        return ToolEnvironment(tools, settings=chosen, turns=CallTurns(chosen, tools))

    return make


def turn(*calls):
    """A turn of a Hermes model, e.g. `turn(("add", {"a": 2}))`."""
    texts = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
