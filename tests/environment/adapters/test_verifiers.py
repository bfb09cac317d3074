"""`verifiers` 0.4, as it is: an agent by its client for training, and a task of ours among its environments."""

import asyncio
import json
import os
import re
import shlex

import msgspec
import numpy as np
import pytest
import tokenizers
from aiohttp import web
from aiohttp.test_utils import TestServer

from laminar_contrib.agents.kind import AgentConfig
from laminar_lab.audit.export import export
from laminar_lab.audit.verify import verify
from laminar_py.config.data import ChatConfig
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.environment.writer import open_writer
from laminar_py.records.environment import Problem
from laminar_py.records.spans import NEW_CONVERSATION, sequences_of
from tests.environment.adapters.packages import ROOT, python_of
from tests.environment.agents.test_agents import Story
from tests.runs.runs import TrainProcess
from tests.runs.test_agents_run import settings

pytestmark = pytest.mark.adapters
HERE = ROOT / "tests/environment/adapters"
PYTHONPATH = f"{ROOT}:{ROOT / 'experiments/verifiers_task'}"
QWEN = ["<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
SUMS = {"id": "sums"}
BRIDGED = {"name": "qwen3", "thinking_retention": "all"}


class SplitCodec:
    """Tokenizer whose model writes `12` in two tokens, where it would have one."""

    def __init__(self, codec):
        self._codec = codec

    def encode(self, text):
        return np.concatenate([self._codec.encode(part) for part in re.split("(?<=1)(?=2)", text)])


def example(page):
    """The first program of a page."""
    return re.search(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)[1]


def write_game(folder):
    """The game of a page, and a line of its data."""
    game, data = folder / "guess.py", folder / "games.jsonl"
    game.write_text(example("docs/environments.md"))
    data.write_text(json.dumps({"prompt": "Let us play. ", "number": 7}) + "\n")
    return game, data


class PlayedStory(Story):
    """A model of Qwen's vocabulary whose agent plays a task of `verifiers`; `renderer` writes its prompts."""

    def __init__(self, folder, *, renderer, taskset=SUMS):
        super().__init__(folder, "")
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.add_special_tokens(QWEN)
        backend.add_tokens(["12"])
        backend.save(str(folder / "tokenizer.json"))
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": self.end}))
        played = [str(HERE / "play.py"), json.dumps(taskset), json.dumps(renderer)]
        command = [str(python_of("verifiers")), *played]
        self.settings = AgentConfig(command=command, timeout_s=120.0)
        self.writer = open_writer(folder, ChatConfig(), self.settings, messages=True)
        self.codec = SplitCodec(load_tokenizer(folder))

    def recorded(self):
        """Branches of the trace that `verifiers` has."""
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def sampled(self):
        """Places of the response that the model wrote."""
        spans = [span for span in self.turn.spans if span.version is not None]
        return np.concatenate([np.arange(span.start, span.end) for span in spans])


async def test_a_rollout_of_verifiers_is_one_sequence_of_the_tokens_that_were_sampled(tmp_path):
    story = PlayedStory(tmp_path, renderer=BRIDGED)
    heard = await story.lead(["12", "4"])
    assert (heard[-1].ends, heard[-1].reward) == (True, 1.0), heard
    assert [answer.follows for answer in heard] == [NEW_CONVERSATION, None, None], "joined, not begun again"
    (branch,) = story.recorded()
    assert branch["said"] == ["2+2=", "12", "more", "4"]
    assert branch["ids"] == story.turn.response_ids.tolist()
    assert np.flatnonzero(branch["sampled"]).tolist() == story.sampled().tolist()
    values = np.array(branch["logprobs"])[story.sampled()]
    assert values.tolist() == [-1.0, -2.0, -3.0, -1.0, -2.0], "of each turn, as they were sampled"


async def test_prompts_that_are_rendered_anew_begin_a_sequence_where_their_tokens_differ(tmp_path):
    story = PlayedStory(tmp_path, renderer={"name": "default"})
    heard = await story.lead(["12", "4"])
    assert heard[-1].reward == 1.0, heard
    assert [answer.follows for answer in heard] == [NEW_CONVERSATION, NEW_CONVERSATION, None], (
        "12 is one token for the tokenizer"
    )
    assert len(story.recorded()) == len(sequences_of(story.turn.spans)) == 2
    again = PlayedStory(tmp_path / "again", renderer={"name": "default"})
    heard = await again.lead(["5", "4"])
    assert [answer.follows for answer in heard] == [NEW_CONVERSATION, None, None], "these do not"


@pytest.mark.parametrize("renderer", [BRIDGED, None], ids=["tokens", "messages"])
async def test_a_task_of_ours_is_an_environment_of_verifiers(tmp_path, monkeypatch, renderer):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    game, data = write_game(tmp_path)
    taskset = {"id": "laminar_task", "path": f"{game}:Guess", "data": str(data), "arguments": {"most_guesses": 3}}
    story = PlayedStory(tmp_path, renderer=renderer, taskset=taskset)
    heard = await story.lead(["3", "9", "7"])
    assert heard[-1].reward == 1.0, heard
    assert [answer.follows for answer in heard] == [NEW_CONVERSATION, None, None, None]
    (branch,) = story.recorded()
    assert branch["said"] == ["Let us play. Guess a number below 10.", "3", "Larger.", "9", "Smaller.", "7"]


async def test_the_agent_of_the_page_plays_a_task_of_its_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    (tmp_path / "play.py").write_text(example("docs/adapters.md"))
    story = PlayedStory(tmp_path, renderer=BRIDGED)
    story.settings = AgentConfig(command=[str(python_of("verifiers")), str(tmp_path / "play.py")], timeout_s=120.0)
    story.turn = msgspec.structs.replace(
        story.turn, problem=Problem(prompt="", fields={"index": 0}, trajectory_id="g0.0")
    )
    heard = await story.lead(["12", "4"])
    assert heard[-1].reward == 1.0, heard
    assert [answer.follows for answer in heard] == [NEW_CONVERSATION, None, None]


async def test_models_of_others_are_evaluated_on_a_task_of_ours(tmp_path):
    async def answer(request):
        said = [message["role"] for message in (await request.json())["messages"]].count("assistant")
        message = {"role": "assistant", "content": ["3", "9", "7"][said]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    write_game(tmp_path)
    page = (ROOT / "experiments/verifiers_task/README.md").read_text()
    program, *arguments = shlex.split(re.search("^vf-eval .*$", page, re.M)[0])
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        told = [url if argument.startswith("http") else argument for argument in arguments]
        variables = {**os.environ, "PYTHONPATH": PYTHONPATH, "OPENAI_API_KEY": "none", "HOME": str(tmp_path)}
        process = await asyncio.create_subprocess_exec(
            python_of("verifiers").with_name(program),
            *told,
            cwd=tmp_path,
            env=variables,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output
    (episode,) = (json.loads(line) for path in tmp_path.rglob("traces.jsonl") for line in path.open())
    assert episode["ok"]
    assert episode["traces"][0]["rewards"]["environment"]["score"] == 1.0


def test_a_run_trains_on_the_tokens_that_verifiers_has_recorded(tmp_path):
    command = [
        str(python_of("verifiers")),
        str(HERE / "play.py"),
        json.dumps(SUMS),
        json.dumps({"name": "default"}),
    ]
    environment = f"command: {json.dumps(command)}, timeout_s: 200"
    small = ("rollout.prompts_per_step=2", "rollout.batch_per_replica=8", "eval.sets={}")
    with TrainProcess(tmp_path, *settings(tmp_path, environment=environment, steps=1), *small) as train:
        train.end_with(0)
    assert not verify(train.run)
    export(train.run, tmp_path / "trained.jsonl", responses=True)
    lines = [json.loads(line) for line in (tmp_path / "trained.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["status"] == "consumed"]
    compared = 0
    for line in trained:
        log = train.run / "environments/agents" / line["id"] / "agent.log"
        branches = [json.loads(told) for told in log.read_text().splitlines() if told.startswith("{")]
        if len(branches) != 1:  # cut, or with special tokens, which a text does not have
            continue
        (branch,), compared = branches, compared + 1
        assert branch["ids"] == line["response_ids"]
        own = np.flatnonzero(branch["sampled"])
        assert np.array(branch["logprobs"])[own].tolist() == np.array(line["logprobs"])[own].tolist()
    assert compared > len(trained) / 2
