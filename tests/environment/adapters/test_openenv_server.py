"""The kind `openenv` against a server that is written with OpenEnv 0.10, as it is."""

import asyncio
import socket
import subprocess
import time
from contextlib import asynccontextmanager, contextmanager

import pytest

from laminar_contrib.environments.openenv_kind import OpenEnvEnvironment, open_openenv
from laminar_lab.audit.verify import verify
from laminar_py.environment.protocol import Problem
from laminar_py.ledger.database import reading
from laminar_py.records.spans import decode_spans, num_turns
from laminar_py.records.trajectory import DropReason
from tests.environment.adapters.packages import ROOT, python_of
from tests.environment.text_story import TextStory
from tests.environment.turns import HOME
from tests.runs.runs import TrainProcess
from tests.runs.test_agents_run import settings

pytestmark = pytest.mark.adapters
PATIENCE_S = 60.0
SERVER = ROOT / "tests/environment/adapters/number_server.py"


@contextmanager
def served(folder, *, sessions=8):
    """A server in a process of its own, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([python_of("openenv"), SERVER, str(port), str(sessions)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline, "it does not listen"
            time.sleep(0.1)
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@asynccontextmanager
async def story_of(url, folder, *, seed=7, **settings):
    async with open_openenv(OpenEnvEnvironment(url=url, **settings), HOME) as make:
        yield TextStory(make, Problem(prompt="find it", seed=seed, fields={"guesses": 11}), folder)


async def found(story, *, pause_s=0.0):
    """Search by halves; the answer that ends it, and the guesses."""
    low, high, guesses = 100, 999, []
    hint = (await story.say())[1]
    assert hint == "11 guesses"
    while True:
        guesses.append((low + high) // 2)
        await asyncio.sleep(pause_s)
        answer, hint = await story.say(f"<think>or 500?</think> {guesses[-1]}")
        if answer.ids is None:
            return answer, guesses
        low, high = (guesses[-1] + 1, high) if hint == "more" else (low, guesses[-1] - 1)


async def test_a_server_is_played_by_many_at_once_and_samples_of_a_group_find_the_same_number(tmp_path):
    with served(tmp_path) as (_, url):
        settings = OpenEnvEnvironment(url=url, action_field="number", form="{hint}")
        async with open_openenv(settings, HOME) as make:
            stories = [
                TextStory(make, Problem(prompt="", seed=seed, fields={"guesses": 11}), tmp_path / f"{place}")
                for place, seed in enumerate([5, 5, 6, 6, 7, 8])
            ]
            ends = await asyncio.gather(*(found(story) for story in stories))
    assert [answer.reward for answer, _ in ends] == [1.0] * 6
    numbers = [guesses[-1] for _, guesses in ends]
    assert numbers[0] == numbers[1]
    assert numbers[2] == numbers[3]
    assert len(set(numbers)) > 2


async def test_a_session_outlasts_a_model_that_samples_for_longer_than_the_server_waits_for_a_pong(tmp_path):
    with served(tmp_path) as (_, url):
        async with story_of(url, tmp_path, action_field="number", form="{hint}") as story:
            await story.say()
            await asyncio.sleep(3.0)
            assert (await story.say("100"))[1] == "more"


async def test_what_the_server_takes_for_no_action_is_told_and_what_it_raises_drops(tmp_path):
    with served(tmp_path) as (_, url):
        async with story_of(url, tmp_path) as story:
            assert (await story.say())[1] == '{"hint":"11 guesses"}'
            assert (await story.say("five hundred"))[1] == "No action. Write one as a JSON object."
            told = (await story.say('{"number": "five"}'))[1]
            assert told.startswith("No action: number: Input should be a valid integer")
            assert (await story.say('{"nummer": 5}'))[1].startswith("No action: number: Field required")
            answer, _ = await story.say('{"number": 13}')
    assert answer.failure is DropReason.ENVIRONMENT_FAILED
    assert "its server says EXECUTION_ERROR: not that one" in answer.detail


async def test_sessions_beyond_those_that_the_server_takes_wait_for_one_that_ends(tmp_path):
    with served(tmp_path, sessions=1) as (_, url):
        settings = OpenEnvEnvironment(url=url, action_field="number", form="{hint}")
        async with open_openenv(settings, HOME) as make:
            problem = Problem(prompt="", seed=7, fields={"guesses": 11})
            stories = [TextStory(make, problem, tmp_path / name) for name in "ab"]
            ends = await asyncio.gather(*(found(story) for story in stories))
    assert [answer.reward for answer, _ in ends] == [1.0, 1.0]


async def test_trajectories_of_a_server_that_crashes_are_lost(tmp_path):
    with served(tmp_path) as (server, url):
        async with story_of(url, tmp_path, action_field="number") as story:
            await story.say()
            server.kill()
            server.wait()
            answer, _ = await story.say("500")
            assert answer.failure is DropReason.ENVIRONMENT_LOST
            other = TextStory(story._make, Problem(prompt=""), tmp_path / "b")
            answer, _ = await other.say()
    assert answer.failure is DropReason.ENVIRONMENT_LOST
    assert f"no session at {url}" in answer.detail


def test_a_run_trains_on_what_a_server_says(tmp_path):
    with served(tmp_path, sessions=64) as (_, url):
        given = f'kind: openenv, url: "{url}", action_field: number, form: "{{hint}}", arguments: {{guesses: 2}}'
        with TrainProcess(
            tmp_path, *settings(tmp_path, steps=2), f"environment={{{given}, max_turns: 4}}"
        ) as train:
            train.end_with(0)
    assert not verify(train.run)
    with reading(train.run) as ledger:
        rows = ledger.execute("SELECT spans, reward FROM trajectory WHERE status = 'consumed'").fetchall()
        dropped = {reason for (reason,) in ledger.execute("SELECT drop_reason FROM trajectory")}
    assert not [reason for reason in dropped if reason and reason.startswith("environment")]
    assert len(rows) >= 32
    assert {reward for _, reward in rows} == {0.0}, "of three digits it knows none"
    assert max(num_turns(decode_spans(spans)) for spans, _ in rows) > 1
