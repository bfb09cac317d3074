"""docs/environments.md: its example plays, its configs are read, and its lists are those of the code."""

import json
import re
import shlex

import pytest
import yaml
from pydantic import TypeAdapter

from laminar_contrib.environments.gymnasium_kind import open_gymnasium
from laminar_contrib.environments.reasoning_gym_kind import EVALUATING, REFUSED
from laminar_py.config.data import DataConfig
from laminar_py.config.environment import ENVIRONMENTS, AnyEnvironmentConfig, EnvironmentConfig
from laminar_py.config.reward import RewardConfig
from laminar_py.environment.host import open_class
from laminar_py.environment.protocol import Problem
from tests.environment.text_story import TextStory
from tests.environment.turns import HOME
from tests.runs.runs import REPO

PAGE = (REPO / "docs/environments.md").read_text()
READERS = {
    "environment": TypeAdapter(AnyEnvironmentConfig).validate_python,
    "reward": lambda given: RewardConfig.model_validate_json(json.dumps(given)),
    "data": lambda given: DataConfig.model_validate_json(json.dumps(given)),
}


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)


CONFIGS = [yaml.safe_load(text) for text in blocks("yaml")]


@pytest.fixture
def game(tmp_path, monkeypatch):
    """Maker of the example's environments, and a problem for it, as the page has them."""
    monkeypatch.chdir(tmp_path)
    text, _ = blocks("python")
    (tmp_path / "guess.py").write_text(text)
    settings = READERS["environment"](CONFIGS[0]["environment"])
    (line,) = map(json.loads, blocks("json"))
    problem = Problem(prompt=line.pop("prompt"), fields=line)
    return lambda: open_class(settings, HOME), problem


@pytest.mark.parametrize("moves", [False, True])
async def test_the_example_plays_in_one_process_and_in_several(game, tmp_path, moves):
    opened, problem = game
    async with opened() as make:
        story = TextStory(make, problem, tmp_path)
        assert (await story.say())[1] == "Guess a number below 10."
        for said, heard in (("3", "Larger."), (" 9\n", "Smaller."), ("²", "That is no number. Again.")):
            if moves:
                story.move()
            assert (await story.say(said))[1] == heard
        answer, _ = await story.say("7")
    assert (answer.ends, answer.reward) == (True, 1.0)


async def test_the_example_ends_after_as_many_guesses_as_its_config_says(game, tmp_path):
    opened, problem = game
    async with opened() as make:
        story = TextStory(make, problem, tmp_path)
        await story.say()
        answers = [(await story.say("1"))[0] for _ in range(4)]
    assert [answer.reward for answer in answers if answer.ends] == [0.0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["environment"]["kind"])
def test_the_configs_are_read(config):
    for section, given in config.items():
        read = READERS[section](given)
        assert section != "environment" or read.kind == given["kind"]


def test_every_kind_that_is_built_in_has_its_config():
    assert {config["environment"]["kind"] for config in CONFIGS} == set(ENVIRONMENTS.names())


@pytest.mark.parametrize("place", [0, 1])
async def test_the_games_of_the_page_begin(place):
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    games = [config["environment"] for config in CONFIGS if config["environment"]["kind"] == "gymnasium"]
    async with open_gymnasium(READERS["environment"](games[place]), HOME) as make:
        (text,) = make().reset(Problem(prompt="", seed=1)).messages
    assert text.startswith(("<red>S</red>FFF", "You have ")[place])


def test_the_scripts_of_the_page_write_different_problems(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    from laminar_contrib.environments import reasoning_gym_data

    monkeypatch.chdir(tmp_path)
    for line in re.search(r"^```\n(python -m .*?)^```$", PAGE, re.M | re.S)[1].splitlines():
        _, _, module, *arguments = shlex.split(line)
        assert module == reasoning_gym_data.__name__
        reasoning_gym_data.main(arguments)
    train, heldout = (
        {json.loads(line)["prompt"] for line in (tmp_path / name).read_text().splitlines()}
        for name in ("train.jsonl", "heldout.jsonl")
    )
    assert len(train) > 4900
    assert len(heldout) > 190
    assert not train & heldout


def test_the_lists_of_tasks_are_those_of_the_code():
    (refused, evaluating) = re.search(r"^Refused are (.*?) The\nscorers of (.*?) \*\*", PAGE, re.M | re.S).groups()
    assert set(re.findall("`(.*?)`", refused)) == set(REFUSED)
    assert set(re.findall("`(.*?)`", evaluating)) == EVALUATING


def test_the_limits_are_settings():
    table = PAGE.partition("## Limits and crashes")[2]
    named = re.findall("`(.*?)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    assert set(named) == set(EnvironmentConfig.model_fields) - {"kind"}
