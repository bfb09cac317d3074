"""An environment of `verifiers`: two sums, asked one after another. It knows nothing of whose model answers."""

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Direct", "SumsEnv", "SumsTaskset"]


class SumsConfig(vf.TasksetConfig):
    prompt: str = "2+2="
    answer: str = "4"


class SumsData(vf.TaskData):
    question: str
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.branches[-1].messages[-1].content == self.data.answer)


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        yield SumsTask(SumsData(question=self.config.prompt, answer=self.config.answer), self.config.task)


class Direct(vf.Harness[vf.HarnessConfig]):
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        said = [{"role": message.role, "content": message.content} for message in data.prompt]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=said)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class SumsEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class SumsEnv(vf.Env[SumsEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as exchange:
            for question in (task.data.question, "more"):
                await exchange.turn(question)
