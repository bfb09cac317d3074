"""The tool `python`: a session in the sandbox for each trajectory."""

import asyncio

import pytest

from laminar_contrib.sandbox.pool import SandboxPool
from laminar_contrib.sandbox.python_session import PythonSession, SessionClosedError
from laminar_contrib.sandbox.records import SandboxError
from laminar_contrib.tools.call_formats import CallFamily
from laminar_contrib.tools.kind import ToolSettings
from laminar_contrib.tools.tool_environment import open_tool_environments
from laminar_py.config.cluster import SandboxConfig
from laminar_py.environment.protocol import Restorable
from tests.environment.tools.conftest import turn


@pytest.fixture
async def make_environment():
    settings = ToolSettings(use=["python", "calculator"], timeout_s=0.5, result_chars=400)
    async with open_tool_environments(settings, SandboxConfig(slots=2, cpu_s=2.0, wall_s=4.0)) as make:
        yield make


async def run(environment, *pieces):
    """Results of pieces of code, called in one turn."""
    answer = await environment.step(turn(*(("python", {"code": code}) for code in pieces)))
    return answer.messages


async def test_variables_live_from_turn_to_turn_in_their_own_trajectory(make_environment):
    one, two = make_environment(), make_environment()
    assert await run(one, "x = 1", "x += 1; print('x is', x)", "x") == ("no output", "x is 2", "2")
    assert (await run(two, "'x' in globals()")) == ("False",)
    assert await run(one, "x + 1") == ("3",)
    await one.close()
    await two.close()


async def test_it_is_neither_deterministic_nor_restorable_and_runs_beside_other_tools(make_environment):
    environment = make_environment()
    assert not environment.deterministic
    assert not isinstance(environment, Restorable)
    answer = await environment.step(turn(("python", {"code": "6 * 6"}), ("calculator", {"expression": "6 * 6"})))
    assert answer.messages == ("36", "36")
    await environment.close()


async def test_errors_are_told_with_their_end_and_variables_stay(make_environment):
    environment = make_environment()
    failed, after = await run(environment, "x = 1\nprint('a' * 10_000)\nx / 0", "x")
    assert failed.startswith("aaa")
    assert "more characters" in failed
    assert failed.endswith("ZeroDivisionError: division by zero")
    assert after == "1"
    await environment.close()


async def test_a_limit_of_the_sandbox_is_told_and_ends_the_variables(make_environment):
    environment = make_environment()
    broken, after = await run(environment, "x = 1\nwhile True: pass", "'x' in globals()")
    assert broken.startswith("time: ")
    assert broken.endswith("The variables are lost.")
    assert after == "False"
    await environment.close()


async def test_time_of_a_call_is_the_business_of_the_sandbox_alone(make_environment):
    environment = make_environment()
    assert await run(environment, "import time; time.sleep(0.8); print('late')") == ("late",)
    await environment.close()


async def test_a_trajectory_waits_for_a_slot_until_another_is_closed(make_environment):
    environments = [make_environment() for _ in range(3)]
    for environment in environments[:2]:
        await run(environment, "x = 1")
    waiting = asyncio.create_task(run(environments[2], "print('here')"))
    await asyncio.sleep(0.7)
    assert not waiting.done()
    await environments[0].close()
    assert await waiting == ("here",)
    for environment in environments:
        await environment.close()


async def test_closing_twice_or_with_nothing_begun_is_fine(make_environment):
    environment, other = make_environment(), make_environment()
    await environment.close()
    await environment.close()
    await run(other, "1")
    await other.close()
    await other.close()


async def test_a_cancelled_turn_leaves_a_session_that_can_be_closed(make_environment):
    environment = make_environment()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await run(environment, "import time; time.sleep(99)")
    assert await run(environment, "1 + 1", "2 + 2") == ("The variables are lost.\n2", "4")
    await environment.close()


async def test_a_session_that_ends_gives_its_slot_back_whatever_runs_or_waits():
    async with asyncio.timeout(30), SandboxPool(slots=1) as pool:
        first, second, third = (PythonSession(pool) for _ in range(3))
        runs = [asyncio.create_task(first.python("while True: pass")) for _ in range(3)]
        await asyncio.sleep(0.3)
        waits = asyncio.create_task(second.python("1"))
        await asyncio.sleep(0.1)
        await second.close()
        await first.close()
        for call in (*runs, waits):
            with pytest.raises(SessionClosedError):
                await call
        with pytest.raises(SessionClosedError):
            await first.python("1")
        assert await third.python("1 + 1") == "2"
        await third.close()


async def test_a_sandbox_that_fails_is_no_result_for_the_model():
    settings = ToolSettings(use=["python"])
    async with open_tool_environments(settings, SandboxConfig(slots=1)) as make:
        environment = make()
    with pytest.raises(SandboxError):
        await run(environment, "1")


async def test_a_tag_holds_code():
    settings = ToolSettings(use=["python"], family=CallFamily.TAGS)
    async with open_tool_environments(settings, SandboxConfig(slots=1)) as make:
        environment = make()
        answer = await environment.step("<python>\nfor i in range(2):\n    print(i)\n</python>")
        assert answer.messages == ("<result>0\n1</result>",)
        await environment.close()
