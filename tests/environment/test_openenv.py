"""The kind `openenv`, with a server that speaks as OpenEnv's does: a game of finding a number."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from laminar_contrib.environments.openenv_kind import OpenEnvEnvironment, open_openenv
from laminar_py.config.section import ConfigError
from laminar_py.environment.protocol import Problem
from laminar_py.records.trajectory import DropReason
from tests.environment.text_story import TextStory
from tests.environment.turns import HOME

MESSAGE = {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["message"]}
GUESS = {"properties": {"low": {"type": "integer"}, "high": {"type": "integer"}}, "required": ["low", "high"]}
SILENCE = object()
PROBLEM = Problem(prompt="guess", answer="4", fields={"most": 3}, seed=11, trajectory_id="g0.0")


class Game:
    """Server of a game; `says` has words in place of its answers, by what they answer; None: its end."""

    def __init__(self, *, schema=MESSAGE, room=64, heartbeat=None, says=None):
        self.schema, self.room, self.heartbeat, self.says = schema, room, heartbeat, says or {}
        self.resets, self.actions, self.open = [], [], 0

    async def _schema(self, request):
        return web.json_response({"action": self.schema, "observation": {}, "state": {}})

    async def _session(self, request):
        socket = web.WebSocketResponse(heartbeat=self.heartbeat)
        await socket.prepare(request)
        if self.open >= self.room:
            data = {"message": f"{self.open} of {self.room} sessions", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": data})
            await socket.close()
            return socket
        self.open += 1
        try:
            async for message in socket:
                given = json.loads(message.data)
                if given["type"] == "close":
                    break
                said = self.says.get(given["type"], self._answer(given))
                if said is SILENCE:
                    continue
                if said is None:
                    request.transport.close()
                    break
                await (socket.send_str(said) if isinstance(said, str) else socket.send_json(said))
        finally:
            self.open -= 1
        return socket

    def _answer(self, given):
        data = given["data"]
        if given["type"] == "reset":
            self.resets.append(data)
            return observation(f"find it in {data.get('most')}", None)
        self.actions.append(data)
        if self.schema is GUESS and not isinstance(data.get("low"), int):
            wrong = [{"loc": ["low"], "msg": "Input should be a valid integer", "type": "int_type"}]
            return {"type": "error", "data": {"message": "Invalid", "code": "VALIDATION_ERROR", "errors": wrong}}
        if data.get("message") == "break":
            return {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}}
        return observation("more", 0.25, done=data.get("message") == "4")

    @asynccontextmanager
    async def served(self):
        app = web.Application()
        app.router.add_get("/schema", self._schema)
        app.router.add_get("/ws", self._session)
        async with TestServer(app) as server:
            yield f"http://127.0.0.1:{server.port}"


def observation(hint, reward, done=False):
    inner = {"hint": hint, "metadata": {"seen": 1}}
    return {"type": "observation", "data": {"observation": inner, "reward": reward, "done": done}}


@asynccontextmanager
async def story_of(game, folder, *, problem=PROBLEM, **settings):
    """A trajectory in a served game."""
    limits = {name: settings[name] for name in ("timeout_s", "max_observation_bytes") if name in settings}
    async with (
        game.served() as url,
        open_openenv(OpenEnvEnvironment(url=url, **settings), HOME) as make,
    ):
        yield TextStory(make, problem, folder, **limits)


async def test_a_game_of_a_server_is_played_in_words_and_its_rewards_are_added_up(tmp_path):
    game = Game()
    async with story_of(game, tmp_path, form="{hint}.", arguments={"least": 1}) as story:
        assert (await story.say())[1] == "find it in 3."
        assert (await story.say("<think>4</think> 3\n"))[1] == "more."
        answer, _ = await story.say("4")
        assert (answer.ends, answer.reward) == (True, 0.5)
        await asyncio.sleep(0.1)
        assert not game.open, "a session ends with its trajectory"
    told = {"least": 1, "most": 3, "prompt": "guess", "answer": "4", "seed": 11, "episode_id": "g0.0"}
    assert game.resets == [told]
    assert game.actions == [{"message": "3"}, {"message": "4"}]


async def test_an_observation_without_a_form_is_json_without_its_metadata(tmp_path):
    async with story_of(Game(), tmp_path) as story:
        assert (await story.say())[1] == '{"hint":"find it in 3"}'


async def test_actions_of_several_fields_are_json_and_what_is_none_is_told_so(tmp_path):
    game = Game(schema=GUESS)
    async with story_of(game, tmp_path, form="{hint}") as story:
        await story.say()
        assert (await story.say("between 1 and 3"))[1] == "No action. Write one as a JSON object."
        assert (await story.say('{"low": "?"}'))[1] == "No action: low: Input should be a valid integer"
        assert (await story.say('so: ```json\n{"low": 1, "high": 3}\n```'))[1] == "more"
    assert game.actions == [{"low": "?"}, {"low": 1, "high": 3}]


async def test_a_pattern_says_where_the_action_stands(tmp_path):
    game = Game()
    async with story_of(game, tmp_path, form="{hint}", pattern="<go>(.*?)</go>") as story:
        await story.say()
        assert (await story.say("4"))[1] == "No action. Write one."
        assert (await story.say("<go>3</go> or <go> 4 </go>"))[0].reward == 0.25
    assert game.actions == [{"message": "4"}]


async def test_a_server_without_rewards_leaves_them_to_other_terms(tmp_path):
    game = Game(says={"step": observation("right", None, done=True)})
    async with story_of(game, tmp_path) as story:
        await story.say()
        answer, _ = await story.say("4")
    assert (answer.ends, answer.reward) == (True, None)


@pytest.mark.parametrize(
    ("says", "reason", "words"),
    [
        ({"step": None}, DropReason.ENVIRONMENT_LOST, "its server ended the session"),
        ({"reset": None}, DropReason.ENVIRONMENT_LOST, "its server ended the session"),
        ({"step": "{]"}, DropReason.ENVIRONMENT_FAILED, "its server sent a message that OpenEnv does not"),
        (
            {"step": "[" * 100_000},
            DropReason.ENVIRONMENT_FAILED,
            "its server sent a message that OpenEnv does not",
        ),
        (
            {"step": {"type": "poem", "data": {}}},
            DropReason.ENVIRONMENT_FAILED,
            "a message that OpenEnv does not define",
        ),
        (
            {"step": observation("?", "high")},
            DropReason.ENVIRONMENT_FAILED,
            "a message that OpenEnv does not define",
        ),
        ({"step": observation("?" * 2000, 0.0)}, DropReason.ENVIRONMENT_FAILED, "max_observation_bytes=1,000"),
        (
            {"step": observation("?" * 2**21, 0.0)},
            DropReason.ENVIRONMENT_FAILED,
            "its server sent too large a message",
        ),
        (
            {"reset": observation("?", 0.0, done=True)},
            DropReason.ENVIRONMENT_FAILED,
            "the server ended the episode at the reset",
        ),
    ],
)
async def test_a_server_that_crashes_or_answers_nonsense_drops_the_trajectory_with_a_reason(
    tmp_path, says, reason, words
):
    async with story_of(Game(says=says), tmp_path, max_observation_bytes=1000) as story:
        answer, _ = await story.say()
        if "step" in says:
            answer, _ = await story.say("4")
    assert answer.failure is reason, answer
    assert words in answer.detail


async def test_what_a_server_could_not_do_drops_the_trajectory_with_its_words(tmp_path):
    async with story_of(Game(), tmp_path) as story:
        await story.say()
        answer, _ = await story.say("break")
    assert answer.failure is DropReason.ENVIRONMENT_FAILED
    assert "its server says EXECUTION_ERROR: it broke" in answer.detail


async def test_a_server_that_does_not_answer_in_time_is_not_waited_for(tmp_path):
    game = Game(says={"step": SILENCE})
    async with story_of(game, tmp_path, timeout_s=0.5) as story:
        await story.say()
        answer, _ = await story.say("4")
        assert answer.failure is DropReason.ENVIRONMENT_TIMEOUT
        await asyncio.sleep(0.1)
        assert not game.open


async def test_pings_of_a_server_are_answered_while_the_model_samples(tmp_path):
    async with story_of(Game(heartbeat=0.2), tmp_path, form="{hint}") as story:
        await story.say()
        await asyncio.sleep(1.0)
        assert (await story.say("3"))[1] == "more"


async def test_a_trajectory_waits_a_while_for_room_on_the_server(tmp_path):
    game = Game(room=1)
    async with story_of(game, tmp_path / "a", form="{hint}") as story:
        await story.say()
        other = TextStory(story._make, PROBLEM, tmp_path / "b")
        waiting = asyncio.create_task(other.say())
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await story.say("4")
        assert (await waiting)[1] == "find it in 3"


async def test_a_trajectory_for_which_there_is_no_room_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("laminar_contrib.environments.openenv_kind.MAX_TRIES", 1)
    async with story_of(Game(room=0), tmp_path) as story:
        answer, _ = await story.say()
    assert answer.failure is DropReason.ENVIRONMENT_FAILED
    assert "its server says CAPACITY_REACHED: 0 of 0 sessions" in answer.detail


@pytest.mark.parametrize("deterministic", [True, False])
async def test_after_the_crash_of_its_process_it_goes_on_where_it_is_deterministic(tmp_path, deterministic):
    game = Game()
    async with story_of(game, tmp_path, form="{hint}", deterministic=deterministic) as story:
        await story.say()
        await story.say("3")
        story.move()
        answer, text = await story.say("5")
    if deterministic:
        assert text == "more"
        assert game.actions == [{"message": "3"}, {"message": "3"}, {"message": "5"}]
    else:
        assert answer.failure is DropReason.ENVIRONMENT_LOST


@pytest.mark.parametrize(
    ("settings", "schema", "words"),
    [
        (
            {"action_field": "text"},
            MESSAGE,
            "environment.action_field=text: no field of an action; choose of mess",
        ),
        (
            {"action_field": "low"},
            GUESS,
            "environment.action_field=low: an action needs high too; remove the setting",
        ),
    ],
)
async def test_a_field_that_actions_do_not_have_is_one_line(tmp_path, settings, schema, words):
    with pytest.raises(ConfigError, match=words):
        async with story_of(Game(schema=schema), tmp_path, **settings):
            raise AssertionError("it is refused")


async def test_an_address_without_a_server_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"environment\.url=http://127.0.0.1:9: no OpenEnv server .*mend the"):
        async with open_openenv(OpenEnvEnvironment(url="http://127.0.0.1:9"), HOME):
            raise AssertionError("it is refused")
    with pytest.raises(ValueError, match=r"environment\.url=localhost: no URL; write for example http://10"):
        OpenEnvEnvironment(url="localhost")


async def test_a_form_with_fields_that_are_not_there_says_which_are(tmp_path):
    async with story_of(Game(), tmp_path, form="{clue}") as story:
        answer, _ = await story.say()
    assert answer.failure is DropReason.ENVIRONMENT_FAILED
    assert "environment.form has 'clue', and an observation has hint" in answer.detail
