"""A process that serves an endpoint with one agent, whose every request is answered by the same text.

`python -m tests.environment.agents.served '{"most": 64, ...}' TEXT [DESCRIPTORS]`; says its address and the key.
"""

import asyncio
import json
import resource
import sys
from contextlib import asynccontextmanager

import numpy as np

from laminar_contrib.agents.agent import AgentEnvironment
from laminar_contrib.agents.connections import ConnectionBounds
from laminar_contrib.agents.endpoint import serve
from laminar_contrib.agents.history import AssistantMessages
from laminar_py.environment.protocol import Problem, SampledTurn
from laminar_py.environment.tool_calls import HermesCalls

IDS = np.array([5, 6], np.int32)


class InNoProcess:
    """Runner of agents that others speak for."""

    async def start(self, problem, *, key, ended):
        self.key = key
        return self

    async def end(self):
        pass


async def answer_all(agent, text):
    await agent.reset(Problem(prompt="", trajectory_id="g0.0"))
    while True:
        agent.receive_turn(SampledTurn(context=IDS, ids=IDS, logprobs=np.zeros(2, np.float32)))
        await agent.step(text)


@asynccontextmanager
async def served_here(bounds, text):
    """Yield the URL of an endpoint in this process, and the key of its only agent."""
    keys, runner = {}, InNoProcess()
    messages = AssistantMessages(HermesCalls())
    agent = AgentEnvironment(runner, messages, None, keys=keys, deterministic=False, most_bytes=2**20)
    async with serve(keys, None, host="127.0.0.1", port=0, bounds=ConnectionBounds(**bounds)) as url:
        answers = asyncio.create_task(answer_all(agent, text))
        await asyncio.sleep(0)
        try:
            yield url, runner.key
        finally:
            answers.cancel()


async def main(bounds, text):
    async with served_here(bounds, text) as (url, key):
        sys.stdout.write(json.dumps({"url": url, "key": key}) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    if len(sys.argv) > 3:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]),) * 2)
    asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2]))
