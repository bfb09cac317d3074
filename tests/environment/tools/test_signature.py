"""Functions as tools: what a model is told of them, and calls that their types admit."""

import asyncio
import functools
from collections.abc import Callable
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from laminar_contrib.tools.tool import ToolError, make_tool
from laminar_py.config.section import ConfigError


class Place(BaseModel):
    x: int
    y: int = 0


def weather(city: Annotated[str, Field(description="Name of it.")], unit: Literal["C", "F"] = "C") -> str:
    """Weather of
    a city.

    From a station."""
    return f"{city} 20 {unit}"


def odd_names(schema: int, _under: int, model_config: int, self: int = 1) -> list[int]:
    return [schema, _under, model_config, self]


@pytest.mark.slow
def test_a_definition_is_the_one_of_transformers():
    from transformers.utils import get_json_schema

    def pay(
        amount: Annotated[float, Field(description="Sum.")], to: Annotated[list[str], Field(description="To.")]
    ):
        """Pay people.

        Args:
            amount: Sum.
            to: To.
        """

    assert make_tool(pay).definition == get_json_schema(pay)


def test_a_definition_is_what_chat_templates_take():
    assert make_tool(weather).definition == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of it."},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                },
                "required": ["city"],
            },
        },
    }


async def test_a_call_gives_the_function_what_was_given_and_its_own_defaults():
    assert await make_tool(weather).call({"city": "Oslo"}) == "Oslo 20 C"
    assert await make_tool(weather).call({"city": "Oslo", "unit": "F"}) == "Oslo 20 F"


async def test_names_that_mean_something_to_pydantic_are_names_like_others():
    assert await make_tool(odd_names).call({"schema": 1, "_under": 2, "model_config": 3}) == [1, 2, 3, 1]


async def test_models_and_wrapped_and_bound_functions_are_fine():
    @functools.lru_cache
    def twice(word: str) -> str:
        return word * 2

    @functools.wraps(weather)
    def later(**arguments):
        return asyncio.sleep(0, weather(**arguments))

    class Map:
        async def move(self, to: Place, by: list[int] | None = None) -> Place:
            return to

    assert await make_tool(twice).call({"word": "ab"}) == "abab"
    assert await make_tool(later).call({"city": "Oslo"}) == "Oslo 20 C"
    assert await make_tool(Map().move).call({"to": {"x": 1}}) == Place(x=1)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({}, "city: Missing required argument"),
        ({"city": 3}, "city: Input should be a valid string"),
        ({"city": "Oslo", "unit": "K"}, "unit: Input should be 'C' or 'F'"),
        ({"city": "Oslo", "country": "Norway"}, "country: Extra inputs are not permitted"),
        ({"a0": "Oslo"}, "city: Missing required argument; a0: Extra inputs are not permitted"),
    ],
)
async def test_arguments_of_another_form_are_refused_before_the_call(given, fault):
    with pytest.raises(ToolError) as caught:
        await make_tool(weather).call(given)
    assert str(caught.value) == fault


def no_type(a: int, b=1): ...
def starred(*a: int): ...
def keywords(**a: int): ...
def by_place(a: int, /): ...
def unknown_type(a: "Nowhere"): ...  # noqa: F821
def no_schema(a: Callable[[], int]): ...
def no_model(a: object()): ...


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (no_type, "argument b has no type; annotate it, e.g. b: str"),
        (starred, "argument *a: int has no name for a model; give it a plain one"),
        (keywords, "argument **a: int has no name for a model; give it a plain one"),
        (by_place, "argument a: int has no name for a model; give it a plain one"),
        (unknown_type, "a type in its signature has no JSON schema (name 'Nowhere' is not defined); give it"),
        (no_schema, "a type in its signature has no JSON schema ("),
        (no_model, "a type in its signature has no JSON schema ("),
        (len, "is no Python function with a name; write it with def"),
        (Place, "is no Python function with a name; write it with def"),
        (lambda a: a, "is no Python function with a name; write it with def"),
    ],
)
def test_a_function_that_a_model_cannot_be_told_of_is_refused_in_one_line(function, fault):
    with pytest.raises(ConfigError) as caught:
        make_tool(function)
    assert str(caught.value).startswith(f"tools.use={function.__name__}: {fault}")
    assert "\n" not in str(caught.value)
