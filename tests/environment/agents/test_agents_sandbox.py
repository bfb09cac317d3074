"""Code of the model that an agent has run in the sandbox: in a session of its trajectory, which ends with that."""

import ast
import asyncio

import pytest

from laminar_py.config.environment import EnvironmentHome
from laminar_py.config.loading import parse_config
from laminar_py.config.sandbox import SandboxConfig
from laminar_py.config.section import ConfigError
from laminar_py.environment.agents.kind import open_agents
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
    home = EnvironmentHome(sandbox=room, folder=tmp_path, model=tmp_path, words=story.writer)
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


@pytest.mark.parametrize(
    ("sandbox", "fault"),
    [
        ({"slots": 15}, r"sandbox\.slots=15: up to 16 .* raise it to 16"),
        ({"slots": 16, "wall_s": 30}, r"sandbox\.wall_s=30: not below environment\.timeout_s=30; lower it"),
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
