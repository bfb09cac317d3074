"""Environments of tools: turns in, results out."""

import asyncio
import logging
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laminar_contrib.tools.kind import ToolSettings
from laminar_contrib.tools.tool_environment import load_tools
from laminar_py.environment.protocol import End, Environment, Observation, Problem, Role
from tests.environment.tools.conftest import turn


async def test_a_turn_with_calls_has_their_results_in_order_and_one_without_ends(environment_of):
    environment: Environment = environment_of("calculator", ":add")
    assert environment.reset(Problem(prompt="2 + 2 = ?")) == Observation()
    calls = turn(("add", {"a": 2}), ("calculator", {"expression": "12*3"}), ("add", {"a": 2, "b": 5}))
    assert await environment.step(f"<think>add?</think>So: {calls}") == Observation(
        ("3", "36", "7"), role=Role.TOOL
    )
    assert await environment.step("It is 36.") == End()


async def test_results_have_the_order_of_calls_that_run_together(environment_of):
    environment = environment_of(":late")
    start = time.monotonic()
    answer = await environment.step(turn(*(("late", {"order": order}) for order in range(3))))
    assert answer.messages == ("0", "1", "2")
    assert environment._tools["late"].function.__globals__["last"] == [2, 1, 0]
    assert time.monotonic() - start < 2


async def test_tags_have_their_results_in_tags(environment_of):
    environment = environment_of("calculator", ":add", family="tags")
    answer = await environment.step("<calculator>12*3</calculator> <add>35</add> <add>x</add>")
    wrong = "error: add: a: Input should be a valid integer, unable to parse string as an integer"
    texts = ("<result>36</result>", "<result>36</result>", f"<result>{wrong}</result>")
    assert answer == Observation(texts, role=Role.TOOL)
    plain = environment_of("calculator", family="tags", result_form="= {};")
    assert (await plain.step("<calculator>2**3</calculator>")).messages == ("= 8;",)


async def test_llama_calls_are_answered(environment_of):
    environment = environment_of(":add", family="llama")
    calls = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'
    assert (await environment.step(calls)).messages == ("2", "3")


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (turn(("sub", {})), "error: no tool is named 'sub'; there are calculator, add, broken, leave,"),
        (
            turn(("x" * 10**6, {})),
            f"error: no tool is named {'x' * 40!r}; there are calculator, add, broken, leave,",
        ),
        (turn(("add", {"a": "one"})), "error: add: a: Input should be a valid integer, unable to parse string"),
        (
            turn(("add", {"b": [{"c": 1}] * 10**5})),
            "error: add: a: Missing required argument; b: Input should be a valid integer",
        ),
        (turn(("add", {"y" * 10**6: 1})), "error: add: a: Missing required argument; yyyy"),
        (turn(("calculator", {"expression": "9**9**9"})), "error: calculator: a number of more than 1000 digits"),
        (turn(("broken", {"reason": "a\nb" * 10**6})), "error: broken: RuntimeError: a ba ba b"),
        (turn(("leave", {"code": 3})), "error: leave: SystemExit: 3"),
        (turn(("exhausted", {"number": 3})), "error: exhausted: RuntimeError: StopIteration:"),
        (turn(("odd", {"number": 0})), "error: odd: ValueError: Exceeds the limit (4300 digits)"),
        (turn(("odd", {"number": 1})), "error: odd: PydanticSerializationError: Unable to serialize unknown type"),
        (
            "<tool_call>{</tool_call>",
            "error: not a call: it is not JSON (Expecting property name enclosed in double",
        ),
        ("<tool_call>" + '{"a":' * 10**5, "error: not a call: no </tool_call> after it"),
    ],
)
async def test_a_call_without_an_answer_says_why_in_one_bounded_line(environment_of, said, line):
    environment = environment_of("calculator", ":add", ":broken", ":leave", ":exhausted", ":odd")
    (text,) = (await environment.step(said)).messages
    assert text.startswith(line)
    assert len(text) <= 200
    assert "\n" not in text


async def test_a_call_that_is_out_of_time_says_so(environment_of):
    (text,) = (await environment_of(":slow", timeout_s=0.2).step(turn(("slow", {"seconds": 1.5})))).messages
    assert text == "error: slow: no answer within 0.2 s"


async def test_what_a_tool_raises_is_logged(environment_of, caplog):
    with caplog.at_level(logging.WARNING):
        await environment_of(":broken").step(turn(("broken", {"reason": "no"})))
    assert "a tool raised: error: broken: RuntimeError: no" in caplog.text


async def test_a_large_result_keeps_its_ends_and_other_values_are_json(environment_of):
    environment = environment_of(":flood", ":table", ":surrogate", result_chars=300)
    calls = turn(
        ("flood", {"size": 10**8}),
        ("table", {"rows": 2}),
        ("table", {"rows": 10**5}),
        ("surrogate", {"number": 1}),
    )
    flood, table, tables, surrogate = (await environment.step(calls)).messages
    assert len(flood) <= 300
    assert "99999700 more characters" in flood
    assert table == '[{"row": 0.0}, {"row": 0.5}]'
    assert len(tables) <= 300
    assert tables.endswith('{"row": 49999.5}]')
    assert surrogate == "?"


@pytest.mark.parametrize(
    "said",
    [
        f"<think>{turn(('add', {'a': 1}))}",
        f"{turn(('add', {'a': 1}))}</think> 2",
    ],
)
async def test_a_call_in_reasoning_runs_nothing(environment_of, said):
    assert await environment_of(":add").step(said) == End()


async def test_calls_beyond_the_most_are_not_run(environment_of):
    environment = environment_of(":late", most_calls=2)
    answer = await environment.step(turn(*[("late", {"order": 3})] * 1000))
    assert answer.messages == ("3", "3", "error: the calls after the first 2 were not run")
    assert environment._tools["late"].function.__globals__["last"] == [3, 3]


@given(st.text() | st.text().map("<tool_call>{}</tool_call>".format))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_turn_has_an_answer(environment_of, said):
    answer = asyncio.run(environment_of("calculator").step(said))
    assert isinstance(answer, Observation if said.startswith("<tool_call>") else End)


def test_definitions_are_those_of_the_tools_in_their_order(own_tools):
    tools = load_tools(ToolSettings(use=["calculator", f"{own_tools}:add"]))
    first, second = (tool.definition["function"] for tool in tools.values())
    assert first["name"] == "calculator"
    assert (second["name"], second["description"]) == ("add", "Sum of two numbers.")
    assert list(first["parameters"]["properties"]) == ["expression"]
