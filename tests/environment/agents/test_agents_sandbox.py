"""Code of the model that an agent has run in the sandbox: in a session of its trajectory, which ends with that."""

import ast
import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest

from laminar_contrib.agents.agent import AgentEnvironment
from laminar_contrib.agents.connections import ConnectionBounds
from laminar_contrib.agents.endpoint import serve
from laminar_contrib.agents.kind import open_agents
from laminar_contrib.sandbox.pool import SandboxPool
from laminar_contrib.sandbox.python_session import PythonSession
from laminar_contrib.tools.call_formats import HermesCalls
from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.environment import EnvironmentHome
from laminar_py.config.loading import parse_config
from laminar_py.config.section import ConfigError
from laminar_py.environment.protocol import Problem
from tests.environment.agents.test_agents import Story

PYTHON = """
import openai
def python(code):
    return client.post("/python", cast_to=object, body={"code": code})["output"]
"""
RUNS_CODE = f"""{PYTHON}
print(python("x = 40"), python("x + 2"), sep="|")
python("import os; open('mine', 'w').write('here')")
print(python("print([os.listdir('.'), sorted(os.environ)])"))
print(python("import socket; socket.create_connection(('127.0.0.1', 1))").splitlines()[-1])
ask()
"""
REFUSED = f"""{PYTHON}
try:
    python("1")
except openai.NotFoundError as error:
    print(error.message)
ask()
reward(0.0)
"""


async def test_a_session_lasts_as_long_as_its_trajectory_and_reaches_nothing(tmp_path):
    story, names = Story(tmp_path, RUNS_CODE, python=True), ("g0.0", "g1.0")
    room = SandboxConfig(slots=1)
    home = EnvironmentHome(sandbox=room, folder=tmp_path, model=tmp_path, decode_turn=story.writer.decode_turn)
    async with asyncio.timeout(60), open_agents(story.settings, home) as make:
        for name in names:  # the second waits for the slot of the first, and finds nothing in it
            agent = make()
            await agent.reset(Problem(prompt="2+2=", answer="4", trajectory_id=name))
            await agent.close()
    for name in names:
        numbers, inside, network = (tmp_path / "agents" / name / "agent.log").read_text().splitlines()[:3]
        assert numbers == "no output|42"
        files, variables = ast.literal_eval(inside)
        assert files == ["mine"]
        assert not {"OPENAI_API_KEY", "OPENAI_BASE_URL", "LAMINAR_PROBLEM"} & set(variables)
        assert "Error" in network or "network" in network, network


async def test_code_is_refused_where_the_run_has_no_sandbox_for_agents(tmp_path):
    story = Story(tmp_path, REFUSED)
    await story.lead(["4"])
    assert "set environment.python" in story.log()


class Client:
    """Requests with the key of an agent."""

    def __init__(self, http, url, key):
        self.http, self.url, self.key = http, url, key

    async def python(self, code):
        """Status of a request to run code, and what it printed."""
        return await self._post("python", {"code": code})

    async def _post(self, path, body):
        headers = {"Authorization": f"Bearer {self.key}"}
        async with self.http.post(f"{self.url}/{path}", json=body, headers=headers) as answer:
            return answer.status, (await answer.json()).get("output")


@asynccontextmanager
async def session_of(pool, folder):
    """An agent with a session of a pool, and who asks with its key."""
    agents, writer = {}, Story(folder, RUNS_CODE).writer
    bounds = ConnectionBounds(connections=16, body_bytes=1000)
    async with (
        asyncio.timeout(60),
        serve(agents, writer.decode_turn, host="127.0.0.1", port=0, bounds=bounds) as url,
        aiohttp.ClientSession() as http,
    ):
        session = PythonSession(pool)
        agent = AgentEnvironment(None, HermesCalls(), agents=agents, deterministic=False, session=session)
        try:
            agents["sk-of-the-agent"] = agent
            yield agent, Client(http, url, "sk-of-the-agent")
        finally:
            await agent.close()


async def begun(agent):
    """Return once code runs for an agent that had code run before."""
    while not agent._session._calls:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)


async def test_code_whose_client_breaks_off_takes_its_variables_with_it(tmp_path):
    async with SandboxPool(slots=1) as pool, session_of(pool, tmp_path) as (agent, client):
        assert await client.python("x = 1") == (200, "no output")
        running = asyncio.create_task(client.python("while True: pass"))
        await begun(agent)
        running.cancel()
        assert await client.python("'x' in globals()") == (200, "The variables are lost.\nFalse")


async def test_code_of_a_trajectory_that_ends_is_refused_whether_it_runs_or_comes_meanwhile(tmp_path):
    async with SandboxPool(slots=1) as pool, session_of(pool, tmp_path) as (agent, client):
        assert await client.python("1") == (200, "1")
        running = asyncio.create_task(client.python("while True: pass"))
        await begun(agent)
        await agent.close()
        assert await running == (410, None)
        assert await client.python("1") == (410, None)


async def test_a_sandbox_that_fails_is_no_fault_of_the_agent(tmp_path):
    async with SandboxPool(slots=1) as pool:
        pass
    async with session_of(pool, tmp_path) as (_, client):
        assert await client.python("1") == (503, None)


@pytest.mark.parametrize(
    ("sandbox", "fault"),
    [
        ({"slots": 15}, r"sandbox\.slots=15: up to 16 .* raise it to 16"),
        ({"slots": 16, "wall_s": 30}, r"sandbox\.wall_s=30: not below environment\.timeout_s=30; lower wall_s"),
    ],
)
def test_a_run_without_room_for_code_of_its_agents_is_refused(tmp_path, sandbox, fault):
    settings = {
        "name": "agents",
        "steps": 1,
        "model": {"path": str(tmp_path)},
        "data": {"train": "train.jsonl"},
        "environment": {"kind": "agent", "command": ["python"], "python": True, "timeout_s": 30},
        "rollout": {"group_size": 4, "batch_per_replica": 8, "replicas": 2},
        "reward": {"use": ["environment"]},
    }
    assert parse_config({**settings, "sandbox": {"slots": 64}}).environment.has_session
    with pytest.raises(ConfigError, match=fault):
        parse_config({**settings, "sandbox": sandbox})
