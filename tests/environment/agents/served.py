"""A process that serves an endpoint with one agent, whose every request is answered by the same text.

`python -m tests.environment.agents.served '{"connections": 64, ...}' TEXT [DESCRIPTORS]` prints address and key.
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
from laminar_contrib.tools.call_formats import HermesCalls
from laminar_py.environment.protocol import Problem, SampledTurn

IDS = np.array([5, 6], np.int32)


class InNoProcess:
    """Runner of agents that others speak for."""

    async def start(self, problem, *, key, exited):
        self.key = key
        return self.end

    async def end(self):
        pass


async def answer_all(agent, text):
    await agent.reset(Problem(prompt="", trajectory_id="g0.0"))
    while True:
        await agent.step_tokens(SampledTurn(text=text, context=IDS, ids=IDS, logprobs=np.zeros(2, np.float32)))


@asynccontextmanager
async def served_here(bounds, text):
    """Yield the URL of an endpoint in this process, and the key of its only agent."""
    agents, runner = {}, InNoProcess()
    agent = AgentEnvironment(runner, HermesCalls(), agents=agents, deterministic=False)
    async with serve(agents, None, host="127.0.0.1", port=0, bounds=ConnectionBounds(**bounds)) as url:
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
