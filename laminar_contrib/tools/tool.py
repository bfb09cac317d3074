"""A typed Python function as a tool: its schema for the chat template, and a validated call, both by pydantic.

    def add(a: int, b: int = 1) -> int:
        '''Sum of two numbers.'''
        return a + b

    tool = make_tool(add)
    await tool.call({"a": 2})  # 3

A tool keeps no state between calls, except as a method of an object that belongs to one trajectory.
"""

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.experimental.arguments_schema import generate_arguments_schema
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import SchemaValidator, to_jsonable_python

from laminar_contrib.sandbox import SandboxError
from laminar_contrib.tools.call_formats import BrokenCall, Call, Json
from laminar_py.config import ConfigError
from laminar_py.environment import call_in_thread

SHOWN_FAULTS = 3  # of a call's arguments
FAULT_CHARS = 200  # of a line that says why a call has no result
NAME_CHARS = 40  # of an unknown tool
TYPES = "give it types that JSON can express, e.g. int, str, list[float], a pydantic model"

log = logging.getLogger(__name__)


class ToolError(ValueError):
    """A call failed; the model reads the message, e.g. `ToolError("division by zero")`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call, see `make_tool`."""

    name: str
    description: str
    parameters: Mapping[str, Json]  # JSON schema of the arguments, an object
    function: Callable[..., object]  # may be a coroutine function
    validator: SchemaValidator  # of the arguments
    has_own_limits: bool = False  # its calls need no timeout

    @property
    def definition(self) -> dict[str, Json]:
        """The tool for a chat template, e.g. `{"type": "function", "function": {"name": "add", ...}}`."""
        parameters = dict(self.parameters)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def sole_argument(self) -> str | None:
        """Name of the only required argument; None if not exactly one is required."""
        names = list(self.parameters.get("required", ())) or list(self.parameters["properties"])
        return names[0] if len(names) == 1 else None

    async def call(self, arguments: Mapping[str, Json]) -> object:
        """Call the function and return its result. A function that is not `async` runs in a thread.

        Raises `ToolError` for wrong arguments, and every error of the function.
        """
        try:
            by_place, by_name = self.validator.validate_python(dict(arguments))
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            lines = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults[:SHOWN_FAULTS]]
            raise ToolError("; ".join(lines)) from error
        named = dict(zip(self.parameters["properties"], by_place, strict=False))
        return await call_function(self.function, **named, **by_name)


async def call_function(function: Callable[..., object], **arguments: object) -> object:
    """Call a function and return its result, in a thread unless the function is `async`. Passes its errors on."""
    if inspect.iscoroutinefunction(function):
        result: object = function(**arguments)
    else:
        result = await asyncio.to_thread(call_in_thread, function, **arguments)
    return await result if inspect.isawaitable(result) else result  # a decorator may hide a coroutine function


class UntitledSchema(GenerateJsonSchema):
    """Makes a JSON schema without titles, which would repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False for all fields."""
        return False


def make_tool(function: Callable[..., object], *, name: str = "", setting: str = "") -> Tool:
    """Make a tool of a function. `name` is the function's own by default; `setting` is where a config names it.

    `Annotated[int, Field(description="...")]` describes an argument. Raises `ConfigError` if a type of the
    function has no JSON schema.
    """
    plain = inspect.unwrap(function)
    name = name or str(getattr(plain, "__name__", type(plain).__name__))
    setting = setting or f"tools.use={name}"
    if not (inspect.isfunction(plain) or inspect.ismethod(plain)) or not name.isidentifier():
        raise ConfigError(f"{setting}: is no Python function with a name; write it with def")
    for argument in inspect.signature(plain).parameters.values():
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise ConfigError(f"{setting}: argument {argument} has no name for a model; give it a plain one")
        if argument.annotation is argument.empty:
            remedy = f"annotate it, e.g. {argument.name}: str"
            raise ConfigError(f"{setting}: argument {argument.name} has no type; {remedy}")
    try:
        validator = SchemaValidator(generate_arguments_schema(plain))
        schema = TypeAdapter(plain).json_schema(schema_generator=UntitledSchema)
    except (PydanticUserError, NameError, TypeError, SyntaxError, AttributeError) as error:
        fault = " ".join(str(error).partition(". ")[0].partition("\n")[0].split())
        raise ConfigError(f"{setting}: a type in its signature has no JSON schema ({fault}); {TYPES}") from error
    schema.pop("additionalProperties", None)
    return Tool(
        name=name,
        description=" ".join((inspect.getdoc(plain) or "").partition("\n\n")[0].split()),
        parameters={"type": "object", "properties": {}, **schema},
        function=function,
        validator=validator,
    )


async def run_call(call: Call, tools: Mapping[str, Tool], *, timeout_s: float, max_chars: int) -> str:
    """Run a call and return its result, or a line that says why it failed.

    The thread of a call that times out keeps running, and its result is dropped. Raises `SandboxError`, which is
    not the model's fault.
    """
    if isinstance(call, BrokenCall):
        return fault_line(f"not a call: {call.fault}")
    tool = tools.get(call.name)
    if tool is None:
        return fault_line(f"no tool is named {call.name[:NAME_CHARS]!r}; there are {', '.join(tools)}")
    try:
        async with asyncio.timeout(None if tool.has_own_limits else timeout_s):
            result = await tool.call(call.arguments)
        # JSON refuses integers that take long to write
        text = result if isinstance(result, str) else json.dumps(to_jsonable_python(result), ensure_ascii=False)
        return _shortened(text, max_chars)
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


def _shortened(text: str, max_chars: int) -> str:
    """Shorten a text to `max_chars` characters by leaving out its middle."""
    if len(text) > max_chars:
        note = f"\n... {len(text) - max_chars} more characters ...\n"
        rest = max_chars - len(note)
        text = text[: rest - rest // 2] + note + text[len(text) - rest // 2 :]
    return text.encode("utf-8", "replace").decode()


def fault_line(text: str) -> str:
    """Write a fault as a line of at most `FAULT_CHARS` characters, e.g. `error: calculator: division by zero`."""
    line = " ".join(f"error: {text[: 2 * FAULT_CHARS]}".split())
    line = line if len(line) <= FAULT_CHARS else f"{line[: FAULT_CHARS - 3]}..."
    return line.encode("utf-8", "replace").decode()
