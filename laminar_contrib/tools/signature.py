"""A typed Python function as a tool: its schema for the chat template, and a validated call.

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
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from laminar_contrib.sandbox import SandboxError
from laminar_py.config import ConfigError
from laminar_py.environment import BrokenCall, Call, Json, call_in_thread

SHOWN_FAULTS = 3  # of a call's arguments
TYPES = "give it types that JSON has a form for, e.g. int, str, list[float], a pydantic model"


class ToolError(ValueError):
    """A call failed; the model reads the message, e.g. `ToolError("division by zero")`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call, see `make_tool`."""

    name: str
    description: str
    parameters: Mapping[str, Json]  # JSON schema of the arguments, an object
    function: Callable[..., object]  # may be a coroutine function
    arguments: type[BaseModel]  # model of the arguments, whose fields have their names as aliases
    is_timed: bool = True  # False: it has limits of its own

    @property
    def definition(self) -> dict[str, Json]:
        """The tool for a chat template, e.g. `{"type": "function", "function": {"name": "add", ...}}`."""
        parameters = dict(self.parameters)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def sole_argument(self) -> str | None:
        """Name of the only required argument; None if not exactly one is required."""
        required = list(self.parameters.get("required", ()))
        names = required or list(self.parameters["properties"])
        return names[0] if len(names) == 1 else None

    def validate(self, given: Mapping[str, Json]) -> dict[str, object]:
        """Validate arguments for the function. Raises `ToolError` if they do not fit its types."""
        try:
            read = self.arguments.model_validate(given, by_alias=True)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            lines = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults[:SHOWN_FAULTS]]
            raise ToolError("; ".join(lines)) from error
        fields = type(read).model_fields
        return {str(fields[place].alias): getattr(read, place) for place in read.model_fields_set}

    async def call(self, given: Mapping[str, Json]) -> object:
        """Call the function and return its answer. A function that is not `async` runs in a thread.

        Raises `ToolError` for wrong arguments, and every error of the function.
        """
        return await called(self.function, self.validate(given))


class ArgumentsSchema(GenerateJsonSchema):
    """Makes a JSON schema without titles, which would repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False for all fields."""
        return False


async def called(function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """Call a function and return its answer; it runs in a thread unless it is `async`. Passes its errors on."""
    if inspect.iscoroutinefunction(function):
        answer: object = function(**arguments)
    else:
        answer = await asyncio.to_thread(call_in_thread, function, **arguments)
    return await answer if inspect.isawaitable(answer) else answer  # a decorator may hide a coroutine function


def make_tool(function: Callable[..., object], *, name: str = "", given: str = "") -> Tool:
    """Make a tool of a function. `name` is the function's own by default; `given` is the setting that names it.

    `Annotated[int, Field(description="...")]` describes an argument. Raises `ConfigError` if a type of the
    function has no JSON schema.
    """
    plain = inspect.unwrap(function)
    name = name or str(getattr(plain, "__name__", type(plain).__name__))
    given = given or f"tools.use={name}"
    if not (inspect.isfunction(plain) or inspect.ismethod(plain)) or not name.isidentifier():
        raise _refused(given, "is no Python function with a name", "write it with def")
    arguments = _arguments_model(function, name=name, given=given)
    try:
        schema = arguments.model_json_schema(by_alias=True, schema_generator=ArgumentsSchema)
    except PydanticUserError as error:
        raise _refused(given, f"a type of it has no JSON schema ({_line(error)})", TYPES) from error
    parameters = {key: value for key, value in schema.items() if key not in ("title", "additionalProperties")}
    description = " ".join((inspect.getdoc(plain) or "").partition("\n\n")[0].split())
    return Tool(name=name, description=description, parameters=parameters, function=function, arguments=arguments)


def _arguments_model(function: Callable[..., object], *, name: str, given: str) -> type[BaseModel]:
    """Make a pydantic model of a function's arguments. Fields are numbered, since pydantic reserves some names."""
    try:
        types = get_type_hints(inspect.unwrap(function), include_extras=True)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise _refused(given, f"a type of it cannot be found ({_line(error)})", "import it") from error
    fields: dict[str, Any] = {}
    for place, argument in enumerate(inspect.signature(function).parameters.values()):
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise _refused(given, f"argument {argument} has no name for a model", "give it a plain one")
        if argument.name not in types:
            fault = f"argument {argument.name} has no type"
            raise _refused(given, fault, f"annotate it, e.g. {argument.name}: str")
        default = ... if argument.default is argument.empty else argument.default
        fields[f"a{place}"] = (types[argument.name], Field(default, alias=argument.name))
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, TypeError) as error:
        raise _refused(given, f"a type of it cannot be read ({_line(error)})", TYPES) from error


def _refused(given: str, fault: str, remedy: str) -> ConfigError:
    return ConfigError(f"{given}: {fault}; {remedy}")


def _line(error: Exception) -> str:
    return " ".join(str(error).partition(". ")[0].partition("\n")[0].split())


FAULT_CHARS = 200  # of a line that says why a call has no answer
NAME_CHARS = 40  # of a tool that there is not

log = logging.getLogger(__name__)


async def result_of(call: Call, tools: Mapping[str, Tool], *, timeout_s: float, chars: int) -> str:
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
    """Return a text as it is, and other values as JSON. Raises `ValueError` if JSON cannot express the value."""
    if isinstance(value, str):
        return value
    return json.dumps(
        to_jsonable_python(value), ensure_ascii=False
    )  # which refuses integers that take long to write


def bounded(text: str, chars: int) -> str:
    """Shorten a text to `chars` characters by leaving out its middle."""
    if len(text) > chars:
        mark = f"\n... {len(text) - chars} more characters ...\n"
        kept = chars - len(mark)
        text = text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :]
    return text.encode("utf-8", "replace").decode()


def fault_line(text: str) -> str:
    """Write a fault as a line of at most `FAULT_CHARS` characters, e.g. `error: calculator: division by zero`."""
    line = " ".join(f"error: {text[: 2 * FAULT_CHARS]}".split())
    line = line if len(line) <= FAULT_CHARS else f"{line[: FAULT_CHARS - 3]}..."
    return line.encode("utf-8", "replace").decode()
