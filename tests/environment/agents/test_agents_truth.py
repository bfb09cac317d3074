"""Agents that do all that agents do, by a seeded script, against the endpoint: what is sampled stays as it was.

They rewrite their history, go back in it, send requests again, several at a time, with tools and without, as
streams and not, with limits of turns, and give up waiting. `LAMINAR_AGENT_REQUESTS=10000` asks more of them.
"""

import asyncio
import json
import os
import random
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import numpy as np

from laminar_contrib.agents.agent import AgentEnvironment
from laminar_contrib.agents.connections import ConnectionBounds
from laminar_contrib.agents.endpoint import serve
from laminar_contrib.agents.history import AssistantMessages
from laminar_contrib.agents.kind import AgentConfig
from laminar_py.environment.calls import EnvironmentCalls
from laminar_py.environment.host import EnvironmentHost, SavedTurns
from laminar_py.environment.tool_calls import HermesCalls
from laminar_py.environment.writer import open_writer
from laminar_py.records.environment import Problem
from laminar_py.records.spans import NEW_CONVERSATION, context_of, sequences_of
from tests.data.templates import TEMPLATES, make_chat_encoder
from tests.environment.turns import appended, first_turn

REQUESTS = int(os.environ.get("LAMINAR_AGENT_REQUESTS", "600"))
EACH = 20  # requests of an agent, about
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SYLLABLES = ["ta", "ri", "17", " ", "no", "\n", "é", "€", "x=", "😀", ".", "lo"]


class Agent:
    """A seeded agent, and what it was answered."""

    def __init__(self, url, name, *, seed):
        self.url, self.name = url, name
        self.rng = random.Random(seed)
        self.asked = []  # (messages, tools, key, answer) of requests, in the order of their answers
        self.given_up = 0
        self.wrong = []

    async def live(self, key, requests):
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(headers=headers) as self.session:
            said = [user(self.rng)]
            for _ in range(requests):
                said = await self.go_on(said)
            async with self.session.post(f"{self.url}/reward", json={"reward": 1.0}) as found:
                assert found.status == 200, await found.text()

    async def go_on(self, said):
        """One thing that agents do; the history from which it goes on."""
        what = self.rng.choices(
            ["ask", "again", "back", "anew", "many", "tools", "give up"], [6, 1, 2, 1, 1, 2, 1]
        )[0]
        if what == "back" and len(self.asked) > 1:
            messages, _, _, answer = self.rng.choice(self.asked)
            said = [*messages, answer, user(self.rng)]
        elif what == "anew":
            said = [{"role": "system", "content": "in short"}, user(self.rng)]
        if what == "again" and self.asked:
            messages, tools, key, answer = self.rng.choice(self.asked)
            if await self.ask(messages, tools, key=key) != answer:
                self.wrong.append(messages)
            return said
        if what == "many":
            answers = await asyncio.gather(*(self.ask([*said, user(self.rng)]) for _ in range(3)))
            return [*said, self.rng.choice(answers), user(self.rng)]
        if what == "give up":
            with_patience = asyncio.create_task(self.ask(said))
            await asyncio.sleep(0.01 * self.rng.random())
            with_patience.cancel()
            await asyncio.gather(with_patience, return_exceptions=True)
            self.given_up += 1
            return [*said, user(self.rng)]
        return await self.use(said, [TOOL] if what == "tools" else [])

    async def use(self, said, tools):
        """Ask, and give the results of the tools that are called."""
        answer = await self.ask(said, tools)
        calls = answer.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": one["id"], "content": str(len(calls))} for one in calls]
        return [*said, answer, *(results or [user(self.rng)])]

    async def ask(self, messages, tools=(), *, key=None):
        known, key = key is not None, key or f"{self.rng.random()}"
        body = {"model": "policy", "messages": messages, "stream": self.rng.random() < 0.3}
        if key.endswith(("1", "2", "3")):
            body["max_tokens"] = int(key[-1]) * 2
        if tools:
            body["tools"] = list(tools)
        if known:
            body["stream"] = False
        headers = {"Idempotency-Key": key}
        async with self.session.post(f"{self.url}/chat/completions", json=body, headers=headers) as found:
            text = await found.text()
            assert found.status == 200, text
        answer = joined(text) if body["stream"] else json.loads(text)["choices"][0]["message"]
        if not known and not body["stream"]:
            self.asked.append((messages, list(tools), key, answer))
        return answer


def user(rng):
    return {"role": "user", "content": "".join(rng.choices(SYLLABLES, k=4))}


def joined(text):
    """Message of a stream."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    message = {"role": "assistant", "content": "".join(delta["content"] or "" for delta in deltas) or None}
    return {**message, "tool_calls": calls} if calls else message


class InThisProcess:
    """Runner of agents that are tasks; all that they did is in `agents`."""

    def __init__(self):
        self.agents, self.url = {}, ""

    async def start(self, problem, *, key, ended):
        agent = self.agents[problem.trajectory_id] = Agent(self.url, problem.trajectory_id, seed=problem.seed)
        agent.task = asyncio.create_task(agent.live(key, EACH))
        agent.task.add_done_callback(lambda task: ended("" if task.cancelled() else f"{task.exception() or ''}"))
        agent.end = self._ending(agent.task)
        return agent

    @staticmethod
    def _ending(task):
        async def end():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        return end


class Model:
    """What an engine samples, and its log: the context and the turn of each."""

    def __init__(self, folder):
        template = TEMPLATES["chatml"]
        made = make_chat_encoder(folder, template.text, arguments=template.arguments)
        self.writer = open_writer(made._model_dir, made._settings, AgentConfig(command=["true"]), messages=True)
        self.encoder, self.codec, self.end = made, made.tokenizer, template.end

    def sample(self, rng):
        if rng.random() < 0.2:
            call = json.dumps({"name": "add", "arguments": {"a": rng.randrange(9)}})
            text = f"<tool_call>\n{call}\n</tool_call>" * rng.randint(1, 2)
        else:
            text = "".join(rng.choices(SYLLABLES, k=rng.randint(1, 8)))
        return np.append(self.codec.encode(text), self.codec.encode(self.end)).astype(np.int32)

    def of(self, log_by_text, messages, answer):
        """Turns in the log that are this answer to these messages."""
        asked = self.encoder.conversation(self.encoder.with_system(messages), answers=True)
        return [
            one
            for one in log_by_text.get(asked, ())
            if self.writer.decode_turn(one[1]) == (answer["content"] or "")
        ]


async def lead(host, model, name, seed):
    """A trajectory from its first word to its end, and its log."""
    rng, log = random.Random(-seed - 1), []
    turn = first_turn(Problem(prompt="?", trajectory_id=name, seed=seed), name=name)
    while True:
        answer = await host.answer(turn)
        if answer.ids is None:
            assert answer.reward == 1.0, answer
            return turn, log
        turn = appended(turn, answer.ids, None, answer.follows, limit=answer.max_tokens)
        sampled, logprobs = model.sample(rng), -np.arange(1.0, 100.0, dtype=np.float32)
        sampled = sampled[: answer.max_tokens]
        logprobs = logprobs[: len(sampled)]
        log.append((turn.response_ids[context_of(turn.spans).places], sampled))
        turn = msgspec.structs.replace(appended(turn, sampled, 3), logprobs=logprobs)


@asynccontextmanager
async def hosted(folder, model):
    """A process of environments whose agents are tasks."""
    settings, keys, runner = AgentConfig(command=["true"], max_turns=1000), {}, InThisProcess()
    messages = AssistantMessages(HermesCalls())

    def make():
        return AgentEnvironment(runner, messages, model.writer, keys=keys, deterministic=False, most_bytes=2**20)

    bounds = ConnectionBounds(most=1024, max_body_bytes=2**22)
    async with serve(keys, model.writer, host="127.0.0.1", port=0, bounds=bounds) as runner.url:
        calls, saved = EnvironmentCalls(settings), SavedTurns(folder / "saved")
        yield EnvironmentHost(make, calls=calls, writer=model.writer, saved=saved, limits=settings), runner


async def test_whatever_agents_do_each_turn_is_sampled_behind_what_was_asked_and_trained_on_once(tmp_path):
    model, counts = Model(tmp_path), []
    async with hosted(tmp_path, model) as (host, runner):
        for first in range(0, REQUESTS // EACH, 10):
            names = range(first, min(first + 10, REQUESTS // EACH))
            led = await asyncio.gather(*(lead(host, model, f"g{one}.0", one) for one in names))
            for turn, log in led:
                counts.append(check(model, runner.agents[turn.trajectory_id], turn, log))
            host.forget([turn.trajectory_id for turn, _ in led])
    plain, repeats = np.sum(counts, axis=0).tolist()
    assert plain > REQUESTS // 3
    assert repeats > REQUESTS // 6


def check(model, agent, turn, log):
    """The record of a trajectory against the engine's log, and what its agent was told against both."""
    assert not agent.wrong, "a request that was sent again has the same answer"
    sampled = [turn.response_ids[span.start : span.end] for span in turn.spans if span.version is not None]
    assert [ids.tolist() for ids in sampled] == [ids.tolist() for _, ids in log]
    own = np.concatenate([path.places[path.own] for path in sequences_of(turn.spans)])
    assert sorted(own.tolist()) == list(range(len(turn.response_ids))), "each token is of one sequence"
    log_by_text = {}
    for context, ids in log:
        log_by_text.setdefault(model.codec.decode(context, special=True), []).append((context, ids))
    plain = [one for one in agent.asked if not one[1] and not any(said.get("tool_calls") for said in one[0])]
    repeats = 0
    for messages, _, _, answer in plain:
        found = model.of(log_by_text, messages, answer)
        assert found, "it was sampled behind something else"
        for before, _, _, earlier in plain:
            if messages[:-1] == [*before, earlier]:  # others are behind these, or written anew in between
                repeats += 1
                known = [np.concatenate(one) for one in model.of(log_by_text, before, earlier)]
                assert any(begins(context, ids) for context, _ in found for ids in known), "it was tokenized again"
    assert any(len(ids) and not model.writer.has_ended(ids) for ids in sampled), "some were cut by their limit"
    anew = [span for span in turn.spans if span.follows == NEW_CONVERSATION]
    assert 0 < len(anew) < len(log), "some are joined, and some are not"
    return len(plain), repeats


def begins(context, ids):
    return context[: len(ids)].tolist() == ids.tolist()
