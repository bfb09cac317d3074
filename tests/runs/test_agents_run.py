"""A run whose trajectories are agents: processes that know an address and a key, and nothing of ours."""

import importlib.util
import json
import random
import sqlite3
from contextlib import closing

import pytest

from laminar_lab.audit.samples import read_sample
from laminar_lab.audit.verify import verify
from laminar_lab.tiny_models import jsonl, tiny_model, write_data
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.records.spans import NEW_CONVERSATION, decode_spans, num_turns, sequences_of
from tests.runs.runs import ALONE, TrainProcess

WORDS = ["<system>", "<user>", "<assistant>", *map(str, range(10)), "more", "less", "say"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
AGENT = """
import json, os
from urllib.request import Request, urlopen

def post(path, body):
    request = Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    with urlopen(request) as answer:
        if body.get("stream"):
            return [line[6:].strip() for line in answer.read().decode().splitlines() if line.startswith("data: ")]
        return json.load(answer)

def ask(said, **more):
    return post("/chat/completions", {"model": "policy", "messages": said, **more})

def streamed(said):
    events = [json.loads(line) for line in ask(said, stream=True) if line != "[DONE]"]
    deltas = [event["choices"][0]["delta"]["content"] for event in events]
    return {"role": "assistant", "content": "".join(deltas)}

problem = json.load(open(os.environ["LAMINAR_PROBLEM"]))
said = [{"role": "user", "content": "say"}]
for turn in range(3):
    found = streamed(said) if turn == 0 else ask(said)["choices"][0]["message"]
    print(found["content"])
    if turn == 0:
        said += [found, {"role": "user", "content": "more"}]
    else:
        said = [{"role": "user", "content": "less"}]  # it forgets
post("/reward", {"reward": float(found["content"] == problem["answer"])})
"""


OF_THE_SDK = """
import os
from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)

async def run(problem):
    client = AsyncOpenAI(api_key=os.environ["OPENAI_API_KEY"])
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = Agent(name="teller", instructions="say", model=model)
    first = await Runner.run(agent, "more")
    again = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "less"}])
    print(first.final_output, again.final_output)
    return float(again.final_output == problem["answer"])
"""


REACT = """
import os, re
from openai import OpenAI

client = OpenAI()

def run(problem):
    chat = client.with_options(api_key=os.environ["OPENAI_API_KEY"]).chat
    said, acts = [{"role": "user", "content": "say"}], []
    for _ in range(3):
        choice = chat.completions.create(model="policy", messages=said, stop=["observe"]).choices[0]
        print(choice.finish_reason, choice.message.content)
        asked = re.findall(r"act (\\d)", choice.message.content)
        if len(asked) != 1:
            break
        acts += asked
        said.append({"role": "assistant", "content": choice.message.content})
        said.append({"role": "user", "content": f"observe {int(asked[0]) * 7 % 10}"})
    return float(problem["answer"] in acts)
"""


def made_up(rng):
    """A demonstration of a model that writes the observations of its actions, too."""
    acts = rng.randint(1, 3)
    return " ".join(f"act {rng.randrange(10)} observe {rng.randrange(10)}" for _ in range(acts))


def settings(
    folder, *, agent=AGENT, environment="", steps=3, words=WORDS, answer=lambda rng: str(rng.randrange(10))
):
    """Overrides of a run whose trajectories are agents, and whose warm start shows such answers."""
    rng = random.Random(0)
    (folder / "agent.py").write_text(agent)

    def told(text):
        return {"role": "user", "content": text}

    shown = [
        {
            "messages": [
                told(rng.choice(["say", "more", "less"])),
                {"role": "assistant", "content": answer(rng)},
            ]
        }
        for _ in range(400)
    ]
    problems = [{"messages": [told(f"{number} {number % 7}")], "answer": str(number % 10)} for number in range(64)]
    write_data(
        folder,
        {
            "train.jsonl": jsonl(problems[:48]),
            "heldout.jsonl": jsonl(problems[48:52]),
            "warm_start.jsonl": jsonl(shown),
            **tiny_model(words, pattern=r"<\w+>|\w+| ", template=TEMPLATE),
        },
    )
    environment = environment or f"command: {json.dumps(['python', str(folder / 'agent.py')])}"
    return (
        f"model.path={folder / 'model'}",
        f"data={{train: {folder / 'train.jsonl'}}}",
        f"eval.sets.heldout={folder / 'heldout.jsonl'}",
        f"warm_start.data={folder / 'warm_start.jsonl'}",
        "warm_start.steps=60",
        f"environment={{kind: agent, {environment}}}",
        "reward.use=environment",
        "rollout.max_len=256",
        "rollout.sampling.max_new_tokens=200",
        f"steps={steps}",
        *ALONE,
    )


def test_a_run_whose_agents_all_fail_ends_and_says_why(tmp_path):
    given = settings(tmp_path)
    (tmp_path / "agent.py").write_text("raise SystemExit('no such tool')")
    with TrainProcess(tmp_path, *given) as train:
        output = train.end_with(1)
    assert "32 trajectories in a row failed (environment_failed), the last: " in output.replace("\n", " ")
    assert "no such tool" in output


def test_agents_train_through_the_endpoint_and_each_token_counts_once(tmp_path):
    with TrainProcess(tmp_path, *settings(tmp_path)) as train:
        train.end_with(0)
    assert not verify(train.run)
    with closing(sqlite3.connect(train.run / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT id, spans, reward FROM trajectory WHERE status = 'consumed'").fetchall()
        dropped = ledger.execute("SELECT drop_reason, count(*) FROM trajectory GROUP BY drop_reason").fetchall()
    assert not [reason for reason, _ in dropped if reason and reason.startswith("environment")], dropped
    whole = {name: spans for name, text, _ in rows if num_turns(spans := decode_spans(text)) == 3}
    assert len(whole) > len(rows) / 2
    for name, spans in whole.items():
        assert [span.follows for span in spans if span.version is None] == [
            NEW_CONVERSATION,
            None,
            NEW_CONVERSATION,
        ]
        assert [path.has_prompt for path in sequences_of(spans)] == [False, False]
        log = train.run / "environments" / "agents" / name / "agent.log"
        assert len(log.read_text().split("\n")) >= 3


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("agents") is None, reason="the OpenAI Agents SDK is not installed")
def test_an_agent_of_a_public_framework_trains_as_it_is(tmp_path):
    function = f"function: '{tmp_path / 'agent.py'}:run'"
    with TrainProcess(tmp_path, *settings(tmp_path, agent=OF_THE_SDK, environment=function, steps=10)) as train:
        train.end_with(0)
    assert not verify(train.run)
    with closing(sqlite3.connect(train.run / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT spans, reward FROM trajectory WHERE status = 'consumed'").fetchall()
        (steps,) = ledger.execute("SELECT count(DISTINCT step) FROM trajectory WHERE kind = 'train'").fetchone()
    assert steps == 10
    told = [decode_spans(spans) for spans, _ in rows]
    assert {num_turns(spans) for spans in told} == {2}
    assert all(spans[2].follows is None for spans in told), "the second request goes on behind the first answer"
    assert {reward for _, reward in rows} == {0.0, 1.0}


@pytest.mark.slow
def test_a_react_loop_with_stop_strings_trains_and_no_made_up_observation_counts(tmp_path):
    words, function = [" ", *WORDS, "act", "observe"], f"function: '{tmp_path / 'agent.py'}:run'"
    given = settings(tmp_path, agent=REACT, environment=function, steps=10, words=words, answer=made_up)
    with TrainProcess(tmp_path, *given) as train:
        train.end_with(0)
    assert not verify(train.run)
    with closing(sqlite3.connect(train.run / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT id, spans, reward FROM trajectory WHERE status = 'consumed'").fetchall()
        (steps,) = ledger.execute("SELECT count(DISTINCT step) FROM trajectory WHERE kind = 'train'").fetchone()
    assert steps == 10
    assert {reward for _, _, reward in rows} == {0.0, 1.0}
    (stop,) = load_tokenizer(tmp_path / "model").encode("observe").tolist()
    stopped = 0
    for name, text, _ in rows:
        spans, ids = decode_spans(text), read_sample(train.run, name).story.response.ids.tolist()
        assert {span.stop for span in spans if span.version is None} == {("observe",)}
        assert [span.follows for span in spans if span.version is None][1:] == [None] * (num_turns(spans) - 1)
        turns = [ids[span.start : span.end] for span in spans if span.version is not None]
        assert all(stop not in turn[:-1] for turn in turns), "a turn ends with its first stop string"
        stopped += sum(turn[-1] == stop for turn in turns)
        assert "observe" not in (train.run / "environments" / "agents" / name / "agent.log").read_text()
    assert stopped > len(rows), "turns end so"
