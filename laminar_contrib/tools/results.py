"""Results of calls as text: whatever a tool does, a bounded text without lone surrogates."""

import asyncio
import json
import logging
from collections.abc import Mapping

from pydantic_core import to_jsonable_python

from laminar_contrib.tools.signature import Tool, ToolError
from laminar_py.environment import BrokenCall, Call
from laminar_py.sandbox import SandboxError

FAULT_CHARS = 200  # of a line that says why a call has no answer
NAME_CHARS = 40  # of a tool that there is not

log = logging.getLogger(__name__)


async def result_of(call: Call, tools: Mapping[str, Tool], *, timeout_s: float, chars: int) -> str:
    """Result of a call, or a line that says why there is none.

    A thread of a call that is out of time goes on; its result is dropped. Raises `SandboxError`, which is no
    fault of the model's.
    """
    if isinstance(call, BrokenCall):
        return fault_line(f"not a call: {call.fault}")
    tool = tools.get(call.name)
    if tool is None:
        return fault_line(f"no tool is named {call.name[:NAME_CHARS]!r}; there are {', '.join(tools)}")
    try:
        async with asyncio.timeout(timeout_s if tool.is_timed else None):
            value = await tool.call(call.arguments)
        return bounded(as_text(value), chars)
    except ToolError as error:
        return fault_line(f"{tool.name}: {error}")
    except TimeoutError:
        return fault_line(f"{tool.name}: no answer within {timeout_s:g} s")
    except SandboxError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a function of the user's, which may raise anything
        line = fault_line(f"{tool.name}: {type(error).__name__}: {error}")
        log.warning("a tool raised: %s", line)
        return line


def as_text(value: object) -> str:
    """A text as it stands, anything else as JSON. Raises `ValueError` for what JSON has no form for."""
    if isinstance(value, str):
        return value
    return json.dumps(
        to_jsonable_python(value), ensure_ascii=False
    )  # which refuses integers that take long to write


def bounded(text: str, chars: int) -> str:
    """A text of at most `chars` characters, the middle of a longer one left out."""
    if len(text) > chars:
        mark = f"\n... {len(text) - chars} more characters ...\n"
        kept = chars - len(mark)
        text = text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :]
    return text.encode("utf-8", "replace").decode()


def fault_line(text: str) -> str:
    """Text as a line, e.g. `error: calculator: division by zero`, of at most `FAULT_CHARS` characters."""
    line = " ".join(f"error: {text[: 2 * FAULT_CHARS]}".split())
    line = line if len(line) <= FAULT_CHARS else f"{line[: FAULT_CHARS - 3]}..."
    return line.encode("utf-8", "replace").decode()
