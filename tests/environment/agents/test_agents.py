"""Agents that know the `openai` package alone, against the endpoint."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import psutil
import pytest

from laminar_contrib.agents import kind
from laminar_contrib.agents.agent import AgentFailedError
from laminar_contrib.agents.kind import AgentConfig, open_agents
from laminar_contrib.agents.runner import GRACE_S
from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.environment import EnvironmentHome
from laminar_py.config.section import ConfigError
from laminar_py.environment.calls import EnvironmentCalls
from laminar_py.environment.host import EnvironmentHost
from laminar_py.environment.protocol import Observation, SampledTurn
from laminar_py.environment.saved_turns import SavedTurns
from laminar_py.environment.writer import open_writer
from laminar_py.records.environment import Problem
from laminar_py.records.spans import NEW_CONVERSATION, sequences_of
from laminar_py.records.stops import tokens_to_stop
from laminar_py.records.trajectory import DropReason
from tests.data.templates import TEMPLATES, make_chat_encoder
from tests.environment.turns import appended, first_turn

NONE = np.empty(0, np.int32)
HEAD = """
import json, os, sys
from openai import OpenAI
client = OpenAI()
problem = json.load(open(os.environ["LAMINAR_PROBLEM"]))
said = [{"role": "user", "content": problem["prompt"]}]
def ask(messages=None, **more):
    answer = client.chat.completions.create(model="policy", messages=messages or said, **more).choices[0].message
    if messages is None:
        said.append(answer.model_dump(exclude_none=True))
    return answer.content
def reward(value):
    client.post("/reward", cast_to=object, body={"reward": value})
"""


def command(folder):
    return ["python", str(folder / "agent.py")]


def home(folder, words=None):
    return EnvironmentHome(
        sandbox=SandboxConfig(), folder=folder, model=folder, decode_turn=words and words.decode_turn
    )


class AgentThreads:
    """Runs the agents of a file as threads of this process, with their log as in a process."""

    def __init__(self, settings, home, *, url):
        self.source, self.folder, self.url = Path(settings.command[-1]).read_text(), home.folder / "agents", url

    async def start(self, problem, *, key, exited):
        folder = self.folder / problem.trajectory_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "problem.json").write_bytes(msgspec.json.encode(problem))
        variables = {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": key, "LAMINAR_MODEL": str(self.folder.parent)}
        os.environ.update(variables, LAMINAR_PROBLEM=str(folder / "problem.json"))
        loop = asyncio.get_running_loop()

        def live():
            fault = ""
            try:
                exec(self.source, {"print": partial(say, folder / "agent.log")})
            except Exception as error:  # noqa: BLE001 - agents raise anything
                fault = repr(error)
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                loop.call_soon_threadsafe(exited, fault)

        thread = threading.Thread(target=live, daemon=True)
        thread.start()
        return lambda: asyncio.to_thread(thread.join, GRACE_S)


def say(path, *words, sep=" "):
    with path.open("a") as log:
        log.write(sep.join(map(str, words)) + "\n")


@contextlib.asynccontextmanager
async def agent_threads(settings, home, *, url):
    yield AgentThreads(settings, home, url=url)


class Story:
    """A model that says given texts, and the trajectory that comes of it.

    The agent is a thread, or else a process, as always where it is a function.
    """

    def __init__(self, folder, agent, *, head=HEAD, is_process=False, **settings):
        template = TEMPLATES["chatml"]
        folder.mkdir(exist_ok=True)
        (folder / "agent.py").write_text(head + agent)
        made = make_chat_encoder(folder, template.text, arguments=template.arguments)
        runs = {"function": f"{folder / 'agent.py'}:run"} if "def run(" in agent else {"command": command(folder)}
        runs = {} if "external" in settings else runs
        self.settings = AgentConfig(**{"timeout_s": 20.0, **runs, **settings})
        self.starts_agents = kind.open_runner if is_process or "function" in runs else agent_threads
        self.writer = open_writer(made._model_dir, made._settings, self.settings, messages=True)
        self.codec, self.end, self.folder = made.tokenizer, template.end, folder
        self.turn = first_turn(Problem(prompt="2+2=", answer="4", trajectory_id="g0.0"))

    def host_of(self, make):
        """Environments of a process, each of them what `make` gives."""
        return EnvironmentHost(
            make,
            calls=EnvironmentCalls(self.settings),
            writer=self.writer,
            saved=SavedTurns(self.folder / "saved"),
            limits=self.settings,
        )

    async def lead(self, says, *, pause_s=0.0, to_the_end=True):
        """Let the model say these, in a new process of environments; all answers of the agent."""
        with mock.patch.object(kind, "open_runner", self.starts_agents):
            return await self._lead(says, pause_s=pause_s, to_the_end=to_the_end)

    async def _lead(self, says, *, pause_s, to_the_end):
        heard = []
        async with open_agents(self.settings, home(self.folder, self.writer)) as make:
            host = self.host_of(make)
            for text in (*says, *([None] if to_the_end else [])):
                answer = await host.answer(self.turn)
                heard.append(answer)
                await asyncio.sleep(pause_s)
                if answer.ids is None:
                    break
                self.append(answer.ids, None, answer.follows, limit=answer.max_tokens, stop=answer.stop)
                ids = self.codec.encode(f"{text}{self.end}")[: answer.max_tokens]
                decode = partial(self.codec.decode, special=True)
                self.say(ids[: tokens_to_stop(lambda _: NONE, ids, answer.stop, decode)])
            if not to_the_end:
                return heard  # and its process ends here
            host.forget(["g0.0"])
            await asyncio.gather(*(one for one in asyncio.all_tasks() if one.get_name() == "close-environment"))
        return heard

    def say(self, ids):
        """A turn of the model."""
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        self.append(ids, 3)
        self.turn = msgspec.structs.replace(self.turn, logprobs=logprobs)

    def append(self, ids, version, follows=None, **limits):
        self.turn = appended(self.turn, ids, version, follows, **limits)

    def log(self):
        return (self.folder / "agents" / "g0.0" / "agent.log").read_text()


async def test_an_agent_is_answered_and_its_next_request_is_joined_by_what_was_sampled(tmp_path):
    story = Story(
        tmp_path, "print(ask()); said.append({'role': 'user', 'content': 'and 3?'}); print(ask()); reward(1)"
    )
    heard = await story.lead(["4", "7"])
    assert [answer.follows for answer in heard] == [NEW_CONVERSATION, None, None], heard
    assert heard[-1].reward == 1.0
    assert story.log().split() == ["4", "7"]
    assert [span.version for span in story.turn.spans] == [None, 3, None, 3]


async def test_the_agent_of_the_page_says_its_reward(tmp_path):
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text()
    (agent,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    heard = await Story(tmp_path, agent, head="").lead(["it is 4"])
    assert heard[-1].reward == 1.0


async def test_an_agent_that_rewrites_its_history_goes_back_to_what_it_repeats_or_begins_anew(tmp_path):
    agent = """
ask()
said.append({"role": "user", "content": "and 3?"})
ask()
said[3:] = [{"role": "user", "content": "no, and 5?"}]  # another way behind the first answer
ask()
said[:] = [{"role": "user", "content": "in short: 9. and 1?"}]
ask()
"""
    story = Story(tmp_path, agent.replace("said[3:]", "said[2:]"))
    heard = await story.lead(["4", "7", "9", "10"])
    spans = story.turn.spans
    assert [answer.follows for answer in heard] == [NEW_CONVERSATION, None, spans[1].end, NEW_CONVERSATION, None]
    assert heard[-1].ends
    assert heard[-1].reward is None, "it said none"
    assert [path.has_prompt for path in sequences_of(spans)] == [False, False, False]
    own = np.concatenate([path.places[path.own] for path in sequences_of(spans)])
    assert sorted(own.tolist()) == list(range(spans[-1].end)), "each token is of one sequence"


async def test_an_agent_that_asks_for_more_than_may_wait_is_told_to_try_again(tmp_path):
    agent = """
import openai
from concurrent.futures import ThreadPoolExecutor
def status(number):
    try:
        said = [{"role": "user", "content": str(number)}]
        OpenAI(max_retries=0).chat.completions.create(model="policy", messages=said)
    except openai.APIStatusError as error:
        return error.status_code
with ThreadPoolExecutor(40) as pool:
    asked = [pool.submit(status, number) for number in range(40)]
    while sum(one.done() for one in asked) < 22:
        time.sleep(0.05)
    reward(1.0)
    print(sorted({one.result() for one in asked if one.result()}))
"""
    story = Story(tmp_path, agent.replace("import openai", "import openai, time"))
    await story.lead(["4"] * 12, pause_s=0.3)
    assert story.log().strip() == "[410, 429]"


async def test_an_agent_gives_each_of_its_roles_a_reward(tmp_path):
    agent = """
import openai
def move(role, said):
    client.chat.completions.create(model=role, messages=[{"role": "user", "content": said}])
move("first", "9 left")
move("second", "7 left")
move("first", "4 left")
try:
    reward({"first": 1.0})
except openai.BadRequestError as error:
    print(error.body["message"])
reward({"first": 1.0, "second": 0.0})
"""
    story = Story(tmp_path, agent)
    heard = await story.lead(["2", "3", "4"])
    assert [(one.role, one.reward, one.turns) for one in heard[-1].roles] == [
        ("first", 1.0, (1, 3)),
        ("second", 0.0, (2,)),
    ]
    assert "role 'second' has turns and no reward" in story.log()


VOTES = """
from concurrent.futures import ThreadPoolExecutor
said = [{"role": "user", "content": "pick a number"}]
def vote(retries=None):
    headers = {} if retries is None else {"X-Stainless-Retry-Count": str(retries)}
    answer = client.chat.completions.create(model="policy", messages=said, extra_headers=headers)
    return answer.choices[0].message.content
with ThreadPoolExecutor(3) as pool:
    print(*sorted(pool.map(lambda _: vote(), range(3))))
print(vote(), vote(), vote(retries=1), vote(retries=2), vote(retries=0))
reward(1.0)
"""


async def test_the_same_question_asked_anew_is_sampled_anew_and_a_retry_is_not(tmp_path):
    story = Story(tmp_path, VOTES)
    heard = await story.lead(["1", "2", "3", "4", "5", "6"])
    assert heard[-1].reward == 1.0
    assert story.log().split("\n")[:2] == ["1 2 3", "4 5 5 5 6"]


async def test_votes_whose_clients_gave_up_waiting_have_an_answer_each_when_they_are_retried(tmp_path):
    agent = """
from concurrent.futures import ThreadPoolExecutor
client = client.with_options(timeout=0.5, max_retries=20)
with ThreadPoolExecutor(3) as pool:
    print(*sorted(pool.map(ask, [[{"role": "user", "content": "pick a number"}]] * 3)))
reward(1.0)
"""
    story = Story(tmp_path, agent)
    await story.lead(["1", "2", "3"], pause_s=1.0)
    assert story.log().split() == ["1", "2", "3"]


async def test_without_a_count_of_retries_a_repeat_is_one_until_the_first_is_answered(tmp_path):
    agent = """
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen
body = json.dumps({"messages": [{"role": "user", "content": "pick a number"}]}).encode()
def vote(_):
    request = Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body)
    request.add_header("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    return json.load(urlopen(request))["choices"][0]["message"]["content"]
with ThreadPoolExecutor(3) as pool:
    print(*pool.map(vote, range(3)))
print(vote(0))
reward(1.0)
"""
    story = Story(tmp_path, agent)
    await story.lead(["1", "2"], pause_s=0.5)
    assert story.log().split("\n")[:2] == ["1 1 1", "2"]


OTHER_FIELDS = {
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "best_of": 2,
    "suffix": "a",
    "guided_regex": "a+",
    "logit_bias": {"5": 1},
    "top_logprobs": 3,
    "functions": [{"name": "f"}],
    "ignore_eos": True,
    "n": 17,
}
DEFAULT_FIELDS = {
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "best_of": 1,
    "n": 1,
    "suffix": None,
    "stop": [],
    "logit_bias": {},
    "temperature": 0.3,
    "seed": 7,
    "user": "me",
    "parallel_tool_calls": True,
    "min_tokens": 0,
    "ignore_eos": False,
}


async def test_what_the_endpoint_does_not_do_it_refuses_by_name(tmp_path):
    agent = f"""
import openai
refused, neutral = {OTHER_FIELDS!r}, {DEFAULT_FIELDS!r}
for name, value in refused.items():
    try:
        ask(said[:1] or None, extra_body={{name: value}})
    except openai.BadRequestError as error:
        print(error.body["message"].split(":")[0])
ask([{{"role": "user", "content": "now"}}], extra_body=neutral)
reward(1.0)
"""
    story = Story(tmp_path, agent)
    heard = await story.lead(["4"])
    assert heard[-1].reward == 1.0
    assert story.log().split() == list(OTHER_FIELDS)


async def test_an_agent_that_wants_no_call_gets_text(tmp_path):
    agent = """
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
call = client.chat.completions.create(model="policy", messages=said, tools=tools, tool_choice="none")
print(call.choices[0].message.content, call.choices[0].message.tool_calls)
reward(1.0)
"""
    story = Story(tmp_path, agent)
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    await story.lead([text])
    assert story.log().strip() == f"{text} None"


LIMITED = """
def limited(**more):
    choice = client.chat.completions.create(model="policy", messages=said, **more).choices[0]
    said.append(choice.message.model_dump(exclude_none=True))
    said.append({"role": "user", "content": "and 3?"})
    print(json.dumps([choice.finish_reason, choice.message.content]))
limited(max_tokens=3)
limited(max_completion_tokens=900)
limited(max_tokens=900, max_completion_tokens=2)
reward(1)
"""


@pytest.mark.parametrize("crashes", [False, True])
async def test_a_turn_that_a_request_limits_is_cut_and_the_next_request_is_joined_behind_it(tmp_path, crashes):
    story = Story(tmp_path, LIMITED, is_process=crashes)
    before = await story.lead(["thirty-seven", "7"][:1], to_the_end=False) if crashes else []
    heard = [*before, *(await story.lead(["thirty-seven", "7", "8, I say"][len(before) :]))]
    assert [answer.max_tokens for answer in heard] == [3, 900, 2, None], heard
    assert [answer.follows for answer in heard] == [NEW_CONVERSATION, None, None, None]
    whole, end = story.codec.encode("thirty-seven"), story.codec.encode(story.end).tolist()
    said = [story.codec.decode(whole[:3]), "7", story.codec.decode(story.codec.encode("8, I say")[:2])]
    told = [json.loads(line) for line in story.log().splitlines()[-3:]]
    assert told == [["length", said[0]], ["stop", said[1]], ["length", said[2]]]
    assert heard[1].ids.tolist()[:1] == end, "what ends the turn is the environment's"
    assert heard[2].ids.tolist() == heard[1].ids.tolist()[1:]
    sampled = [story.turn.response_ids[span.start : span.end] for span in story.turn.spans if span.version]
    assert sampled[0].tolist() == whole[:3].tolist()


async def test_streams_and_tokens_say_that_their_limit_has_cut_them(tmp_path):
    agent = """
events = list(client.chat.completions.create(model="policy", messages=said, stream=True, max_tokens=3))
print(json.dumps("".join(event.choices[0].delta.content for event in events)), events[-1].choices[0].finish_reason)
def generate(ids, **more):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    body = {"model": "policy", "token_ids": ids, **more}
    found = client.with_options(base_url=url).post("/inference/v1/generate", cast_to=object, body=body)
    print(found["choices"][0]["finish_reason"], len(found["choices"][0]["token_ids"]))
    return found["prompt_token_ids"] + found["choices"][0]["token_ids"]
one = generate([5, 6], sampling_params={"max_tokens": 2, "temperature": 0.5})
generate([*one, 8, 9], max_tokens=1, sampling_params={"max_tokens": 2})
generate([7])
"""
    story = Story(tmp_path, agent)
    heard = await story.lead(["thirty-seven"] * 3 + ["4"])
    assert [answer.max_tokens for answer in heard] == [3, 2, 1, None, None]
    text = json.dumps(story.codec.decode(story.codec.encode("thirty-seven")[:3]))
    assert story.log().splitlines() == [
        f"{text} length",
        "length 2",
        "length 1",
        f"stop {len(story.codec.encode('4')) + 1}",
    ]
    assert heard[2].ids.tolist() == [8, 9], "ids are taken as they are"
    assert heard[2].follows is None


STOPPED = """
def ask(**more):
    choice = client.chat.completions.create(model="policy", messages=said, **more).choices[0]
    said.append(choice.message.model_dump(exclude_none=True))
    said.append({"role": "user", "content": "Observation: 4"})
    print(json.dumps([choice.finish_reason, choice.message.content]))
ask(stop=["Observation:", "Stop"])
ask(stop="Observation:")
ask(stop="Observation:", max_tokens=3)
reward(1)
"""
THOUGHT, MADE_UP = "Action: add 2 2\n", "Observation: 5\nAnswer: 5"


@pytest.mark.parametrize("crashes", [False, True])
async def test_an_answer_ends_before_a_stop_string_and_the_next_request_is_joined_behind_it(tmp_path, crashes):
    story = Story(tmp_path, STOPPED, is_process=crashes)
    says = [f"{THOUGHT}{MADE_UP}", "Answer: 4", "thirty-seven"]
    before = await story.lead(says[:1], to_the_end=False) if crashes else []
    heard = [*before, *(await story.lead(says[len(before) :]))]
    assert [answer.stop for answer in heard] == [("Observation:", "Stop"), *[("Observation:",)] * 2, ()], heard
    assert [answer.follows for answer in heard] == [NEW_CONVERSATION, None, None, None]
    told = [json.loads(line) for line in story.log().splitlines()[-3:]]
    cut = story.codec.decode(story.codec.encode("thirty-seven")[:3])
    assert told == [["stop", THOUGHT], ["stop", "Answer: 4"], ["length", cut]]
    assert heard[1].ids.tolist()[:1] == story.codec.encode(story.end).tolist(), "the environment ends the turn"
    sampled = [story.turn.response_ids[span.start : span.end] for span in story.turn.spans if span.version]
    whole = story.codec.encode(f"{THOUGHT}{MADE_UP}")
    assert sampled[0].tolist() == whole[: len(sampled[0])].tolist()
    assert "Observation:" in story.codec.decode(sampled[0])
    assert "Observation:" not in story.codec.decode(sampled[0][:-1])


async def test_a_request_in_tokens_is_stopped_too_and_its_unknown_sampling_params_are_refused(tmp_path):
    agent = """
import openai
def generate(ids, **more):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    body = {"model": "policy", "token_ids": ids, **more}
    found = client.with_options(base_url=url).post("/inference/v1/generate", cast_to=object, body=body)
    return found["choices"][0]
params = {"logprobs": 1, "stop_token_ids": [1], "n": 1, "include_stop_str_in_output": False}
one = generate([5, 6], stop="8", n=1, stream=False, sampling_params={"stop": ["Observation:"], **params})
print(one["finish_reason"], json.dumps(one["token_ids"]))
try:
    generate([5, 6], sampling_params={"n": 2})
except openai.BadRequestError as error:
    print(error.body["message"].split(":")[0])
"""
    story = Story(tmp_path, agent)
    heard = await story.lead([f"{THOUGHT}{MADE_UP}"])
    assert heard[0].stop == ("8", "Observation:")
    stopped, refused = story.log().splitlines()
    reason, ids = stopped.split(" ", 1)
    assert reason == "stop"
    assert story.codec.decode(np.array(json.loads(ids))).startswith(f"{THOUGHT}Observation:")
    assert refused == "n"


@pytest.mark.parametrize("stop", ["", ["a", ""], ["a"] * 5, "a" * 257, 7])
async def test_stop_strings_that_cannot_be_are_refused_with_their_field(tmp_path, stop):
    agent = f"""
import openai
try:
    ask(stop={stop!r})
except openai.BadRequestError as error:
    print(error.body["message"])
ask()
"""
    story = Story(tmp_path, agent)
    await story.lead(["4"])
    assert "$.stop" in story.log()


@pytest.mark.parametrize("result", ["4", ""])
async def test_calls_of_tools_are_the_agents_to_make_and_its_results_go_on(tmp_path, result):
    agent = """
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ask(tools=tools)
call = said[-1]["tool_calls"][0]
print(call["function"]["name"], json.loads(call["function"]["arguments"])["a"])
said.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})
print(ask(tools=tools, stream=False))
"""
    story = Story(tmp_path, agent.replace("RESULT", repr(result)))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    heard = await story.lead([call, "it is 4"])
    assert [answer.follows for answer in heard] == [NEW_CONVERSATION, None, None]
    assert story.log().split("\n")[:2] == ["add 2", "it is 4"]


async def test_a_stream_has_the_whole_answer(tmp_path):
    agent = """
def stream(**more):
    return list(client.chat.completions.create(model="policy", messages=said, stream=True, **more))
events = stream(stream_options={"include_usage": True}, logprobs=True)
parts = [event for event in events if event.choices]
print(json.dumps([event.choices[0].delta.content for event in parts]))
print("".join(token.token for event in parts for token in event.choices[0].logprobs.content))
print([token.logprob for event in parts for token in event.choices[0].logprobs.content][:3])
print(json.dumps([token.bytes for event in parts for token in event.choices[0].logprobs.content]))
print(events[-1].usage.completion_tokens, parts[-1].choices[0].finish_reason)
print([event.choices[0].delta.role for event in parts][:3])
said += [{"role": "assistant", "content": "".join(event.choices[0].delta.content for event in parts)},
         {"role": "user", "content": "and 3?"}]
print("".join(event.choices[0].delta.content for event in stream()))
"""
    story = Story(tmp_path, agent)
    text = "thirty-seven \u20ac and \U0001f600"
    heard = await story.lead([text, "7"])
    assert heard[1].follows is None, "what was streamed is what was said"
    parts, whole, values, token_bytes, usage, roles, again = story.log().split("\n")[:7]
    assert "".join(json.loads(parts)) == text
    assert whole.startswith("thirty-seven")
    assert json.loads(values) == [-1.0, -2.0, -3.0]
    found = json.loads(token_bytes)
    assert bytes(byte for data in found for byte in data).decode() == text, (
        "parts of a character have their own bytes"
    )
    assert found[-1] == []
    assert usage.split() == [str(len(story.codec.encode(text)) + 1), "stop"]
    assert roles == "['assistant']"
    assert again == "7"


async def test_an_answer_has_its_tokens_and_their_log_probabilities(tmp_path):
    agent = """
first = client.chat.completions.create(
    model="policy", messages=said, logprobs=True, extra_body={"return_token_ids": True})
print(json.dumps([one.logprob for one in first.choices[0].logprobs.content]))
print(json.dumps([first.prompt_token_ids, first.choices[0].token_ids]))
print(first.usage.prompt_tokens, first.usage.completion_tokens)
both = client.chat.completions.create(model="policy", messages=said + said, n=2)
print([choice.message.content for choice in both.choices])
"""
    story = Story(tmp_path, agent)
    heard = await story.lead(["4", "5", "6"])
    logprobs, ids, usage, both = story.log().split("\n")[:4]
    prompt, sampled = json.loads(ids)
    assert prompt == heard[0].ids.tolist()
    assert sampled == story.codec.encode(f"4{story.end}").tolist()
    assert json.loads(logprobs) == [-1.0, -2.0]
    assert usage.split() == [str(len(prompt)), "2"]
    assert both == "['5', '6']"
    assert [answer.follows for answer in heard] == [NEW_CONVERSATION, NEW_CONVERSATION, NEW_CONVERSATION, None], (
        "each choice is sampled from the start"
    )


async def test_a_request_in_tokens_goes_on_behind_the_longest_turn_that_it_repeats(tmp_path):
    agent = """
def generate(ids):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    body = {"model": "policy", "token_ids": ids, "sampling_params": {}}
    found = client.with_options(base_url=url).post("/inference/v1/generate", cast_to=object, body=body)
    print(json.dumps(found))
    return found["prompt_token_ids"] + found["choices"][0]["token_ids"]
one = generate([5, 6, 7])
two = generate([*one, 8, 9])
generate([*one, 10])
generate([*two, 11])
generate([5, 6, 8])
reward(0.5)
"""
    story = Story(tmp_path, agent)
    heard = await story.lead(["4", "7", "9", "10", "11"])
    assert heard[-1].reward == 0.5, heard[-1]
    answers = [json.loads(line) for line in story.log().split("\n")[:5]]
    four = story.codec.encode(f"4{story.end}").tolist()
    assert [answer["prompt_token_ids"] for answer in answers[:3]] == [
        [5, 6, 7],
        [5, 6, 7, *four, 8, 9],
        [5, 6, 7, *four, 10],
    ]
    assert [answer["choices"][0]["logprobs"]["content"][0] for answer in answers[:1]] == [
        {"token": f"token_id:{four[0]}", "logprob": -1.0}
    ]
    ends = [span.end for span in story.turn.spans if span.version is not None]
    assert [answer.follows for answer in heard[:5]] == [NEW_CONVERSATION, None, ends[0], ends[1], NEW_CONVERSATION]
    assert [answer.ids.tolist() for answer in heard[:5]] == [[5, 6, 7], [8, 9], [10], [11], [5, 6, 8]]


REFUSED = [  # what an agent asks, and the status that it is told
    ("OpenAI(api_key='sk-other').models.list()", 401),
    ("client.chat.completions.create(model='policy', messages=[])", 400),
    ("client.chat.completions.create(model='policy', messages=said, n=0)", 400),
    ("ask(max_tokens=0)", 400),
    ("ask(max_completion_tokens=-1)", 400),
    ("ask(max_tokens=2**31)", 400),
    ("ask(extra_body={'max_tokens': '64'})", 400),
    ("client.post('/../inference/v1/generate', cast_to=object, body={'token_ids': [-1]})", 400),
    ("client.chat.completions.create(model='policy', messages=[{'role': 'poet', 'content': '?'}])", 400),
    ("ask([{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'x'}}]}])", 400),
    ("ask([{'role': 'user', 'content': '?'}, {'role': 'assistant', 'content': '4'}])", 400),
    ("reward(1e300)", 400),
    ("ask([{'role': 'user', 'content': 'a' * 100_000_000}])", 413),
    ("reward(1); OpenAI(max_retries=0).chat.completions.create(model='policy', messages=[said[0]] * 2)", 410),
]


async def test_what_cannot_be_answered_is_refused_by_a_status(tmp_path):
    agent = f"""
import openai
ask()
for asks in {[asks for asks, _ in REFUSED]}:
    try:
        exec(asks)
        print("answered")
    except openai.APIStatusError as error:
        print(error.status_code)
"""
    story = Story(tmp_path, agent)
    await story.lead(["4"])
    told = [int(status) for status in story.log().split()]
    assert list(zip([asks for asks, _ in REFUSED], told, strict=True)) == REFUSED


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("sys.exit(3)", "the agent ended with code 3: it wrote nothing"),
        ("raise ValueError('no\\nway')", "the agent ended with code 1: way"),
        ("", "the agent ended before its first request to the model; see its log"),
    ],
)
async def test_an_agent_that_fails_drops_its_trajectory_with_its_last_words(tmp_path, agent, words):
    heard = await Story(tmp_path, agent, is_process=True).lead(["4"])
    assert heard[-1].failure is DropReason.ENVIRONMENT_FAILED
    assert words in heard[-1].detail


async def test_a_port_that_another_has_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = f"environment.port={port}: cannot be served on 127.0.0.1 .*choose another, or 0"
        with pytest.raises(ConfigError, match=words):
            async with open_agents(AgentConfig(command=["true"], port=port), home(tmp_path)):
                raise AssertionError("it is served")


EXTERNAL = """
import json, sys
import openai
there = json.load(open(sys.argv[1]))
run = openai.OpenAI(base_url=there["url"], api_key=there["key"])
try:
    run.with_options(api_key="sk-other").post("/trajectories", cast_to=object)
except openai.AuthenticationError:
    print("refused")
try:
    run.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
except openai.AuthenticationError:
    print("no agent")
taken = run.post("/trajectories", cast_to=object)
client = run.with_options(api_key=taken["key"])
said = [{"role": "user", "content": taken["problem"]["prompt"]}]
answer = client.chat.completions.create(model="policy", messages=said).choices[0].message.content
print(taken["id"], answer)
try:
    client.post("/trajectories", cast_to=object)
except openai.AuthenticationError:
    print("not of the run")
client.post("/reward", cast_to=object, body={"reward": float(answer == taken["problem"]["answer"])})
"""


def wait_for_file(path):
    for _ in range(1000):
        if path.is_file():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} is not there")


async def test_an_external_agent_takes_a_trajectory_with_the_key_of_the_run(tmp_path):
    story = Story(tmp_path, "", external=True)
    (tmp_path / "external.py").write_text(EXTERNAL)
    where = tmp_path / "agents" / "external-0.json"

    async def come():
        await asyncio.to_thread(wait_for_file, where)
        command = [sys.executable, str(tmp_path / "external.py"), str(where)]
        agent = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        return (await agent.communicate())[0].decode().split("\n")[:4]

    said, heard = await asyncio.gather(come(), story.lead(["4"]))
    assert said == ["refused", "no agent", "g0.0 4", "not of the run"]
    assert (heard[-1].ends, heard[-1].reward) == (True, 1.0)
    assert where.stat().st_mode & 0o777 == 0o600


async def test_a_trajectory_that_no_external_agent_takes_is_dropped_in_time(tmp_path):
    story = Story(tmp_path, "", external=True, timeout_s=0.5)
    (answer,) = await story.lead([])
    assert answer.failure is DropReason.ENVIRONMENT_TIMEOUT


async def test_the_key_of_a_run_stays_when_its_process_does_not(tmp_path):
    settings, keys = AgentConfig(external=True), []
    for _ in range(2):
        async with open_agents(settings, home(tmp_path)):
            keys.append(json.loads((tmp_path / "agents" / "external-0.json").read_text())["key"])
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"command": ["true"], "port": 65_535, "workers": 2}, "environment.port=65535: 2 processes need as many"),
        ({}, "environment.command, environment.function, environment.external: 0 are set; set one"),
        ({"command": ["true"], "external": True}, "environment.external: 2 are set; set one"),
        ({"function": "agent.py"}, "environment.function=agent.py: write path/to/file.py:function"),
        (
            {"command": ["true"], "family": kind.CallFamily.TAGS},
            "environment.family=tags: agents name their arguments",
        ),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings, words):
    with pytest.raises(ValueError, match=words):
        AgentConfig(**settings)


async def test_commands_have_the_signals_that_shells_expect_and_the_tokenizer(tmp_path):
    agent = """
import subprocess
print(subprocess.run("exec 2>&1; yes | head -1", shell=True, stdout=subprocess.PIPE, text=True).stdout)
print(os.path.isfile(os.environ["LAMINAR_MODEL"] + "/tokenizer.json"))
ask()
"""
    story = Story(tmp_path, agent, is_process=True)
    await story.lead(["4"])
    assert story.log().split() == ["y", "True"]


async def test_an_agent_ends_with_its_trajectory_and_all_that_it_started(tmp_path):
    agent = """
import subprocess
ask()
child = subprocess.Popen(["sleep", "1000"])
print(os.getpid(), child.pid, flush=True)
reward(0.5)
child.wait()
"""
    story = Story(tmp_path, agent, is_process=True)
    heard = await story.lead(["4"])
    assert heard[-1].reward == 0.5
    pids = [int(pid) for pid in story.log().split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


async def test_a_function_is_imported_once_and_what_it_returns_is_the_reward(tmp_path):
    agent = """
import os, random
from openai import AsyncOpenAI
print("imported")
kept = open(os.devnull, "w")
async def run(problem):
    kept.write("open still")
    kept.flush()
    said = [{"role": "user", "content": problem["prompt"]}]
    answer = await AsyncOpenAI().chat.completions.create(model="policy", messages=said)
    print(answer.choices[0].message.content, os.getcwd(), random.random())
    return 0.25
"""
    story = Story(tmp_path, agent, head="", keep_folders=True)
    story_log = []
    for _ in range(2):
        heard = await story.lead(["4"])
        assert heard[-1].reward == 0.25, heard
        story_log.append(story.log())
        story.turn = msgspec.structs.replace(story.turn, response_ids=story.turn.response_ids[:0], spans=())
        (tmp_path / "saved").rename(tmp_path / f"saved-{len(story_log)}")
    said, where, drawn = story_log[0].split()
    assert (said, where) == ("4", str(tmp_path / "agents/g0.0"))
    assert story_log[1].split() == [said, where, drawn] * 2, "the same agent draws the same"
    assert (tmp_path / "agents/launcher.log").read_text().split() == ["imported"] * 2


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("def run(problem):\n    raise ValueError('no way')", "the agent ended with code 1: ValueError: no way"),
        ("def run(problem):\n    sys.exit('no more')", "the agent ended with code 1: no more"),
    ],
)
async def test_a_function_that_fails_drops_its_trajectory_with_its_last_words(tmp_path, agent, words):
    story = Story(tmp_path, agent, head="import sys\n")
    heard = await story.lead(["4"])
    assert heard[-1].failure is DropReason.ENVIRONMENT_FAILED
    assert words in heard[-1].detail


async def test_a_file_without_the_function_is_one_line(tmp_path):
    (tmp_path / "agent.py").write_text("def other(): ...")
    settings = AgentConfig(function=f"{tmp_path}/agent.py:run")
    with pytest.raises(ConfigError, match=r"environment.function=.*/agent.py has no function run; mend it"):
        async with open_agents(settings, home(tmp_path)):
            raise AssertionError("it is open")


REWRITES = """
ask()
said.append({"role": "user", "content": "and 3?"})
ask()
said[2:] = [{"role": "user", "content": "no, and 5?"}]
ask()
said[:] = [{"role": "user", "content": WORDS}]
print(ask())
reward(1)
"""


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
async def test_an_agent_whose_process_crashed_is_started_over_and_asks_the_same(tmp_path, turns):
    says = ["4", "7", "9", "10"]
    whole = Story(tmp_path / "whole", REWRITES.replace("WORDS", "'in short: 9'"))
    await whole.lead(says)
    story = Story(tmp_path / "parts", REWRITES.replace("WORDS", "'in short: 9'"))
    await story.lead(says[:turns], to_the_end=False)
    heard = await story.lead(says[turns:])
    assert heard[-1].reward == 1.0, heard[-1]
    assert story.turn.spans == whole.turn.spans
    assert story.turn.response_ids.tolist() == whole.turn.response_ids.tolist()
    assert story.log() == "10\n"


async def test_an_agent_that_asks_otherwise_over_again_is_dropped(tmp_path):
    story = Story(tmp_path, REWRITES.replace("WORDS", "'in short: 9'").replace('"and 3?"', "str(os.urandom(4))"))
    await story.lead(["4", "7", "9"], to_the_end=False)
    heard = await story.lead(["10"])
    assert heard[-1].failure is DropReason.ENVIRONMENT_LOST
    assert "the replay answered turn 1 differently" in heard[-1].detail


async def test_agents_of_a_launcher_that_is_killed_fail_and_others_begin(tmp_path):
    agent = """
import signal, time
ask()
if problem["prompt"] == "2+2=":
    launcher = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1]  # above the guard
    os.kill(int(launcher), signal.SIGKILL)
    time.sleep(60)
said.append({"role": "user", "content": "and 3?"})
ask()
"""
    story = Story(tmp_path, agent)
    async with open_agents(story.settings, home(tmp_path, story.writer)) as make:
        for prompt, fault in (("2+2=", "the process that starts agents has crashed"), ("3+3=", "")):
            environment = make()
            await environment.reset(msgspec.structs.replace(story.turn.problem, prompt=prompt))
            turn = SampledTurn(text="4", context=NONE, ids=NONE, logprobs=NONE)
            if fault:
                with pytest.raises(AgentFailedError, match=fault):
                    await environment.step_tokens(turn)
            else:
                assert isinstance(await environment.step_tokens(turn), Observation)
            await environment.close()


def test_agents_and_what_they_start_end_with_whoever_had_them_started(tmp_path):
    (tmp_path / "agent.py").write_text(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "open('pids', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "time.sleep(1000)\n"
    )
    parent = f"""
import asyncio, os, signal
from pathlib import Path
from laminar_contrib.agents.runner import AgentRunner
from laminar_py.environment.protocol import Problem
async def main():
    folder = Path({str(tmp_path)!r})
    command = [{sys.executable!r}, str(folder / "agent.py")]
    folders = dict(folder=folder / "agents", model=folder, keep_folders=True)
    runner = AgentRunner(command=command, function="", url="", **folders)
    await runner.start(Problem(prompt="", answer="", trajectory_id="t"), key="", exited=print)
    while not (folder / "agents/t/pids").exists() or not (folder / "agents/t/pids").read_text():
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", parent], check=False, timeout=60).returncode == -signal.SIGKILL
    pids = [int(pid) for pid in (tmp_path / "agents/t/pids").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, "they go on"
        time.sleep(0.01)
