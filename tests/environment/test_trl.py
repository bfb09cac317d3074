"""The kind `trl`: classes for TRL's `environment_factory`, as TRL itself takes them."""

import asyncio
import warnings
from contextlib import asynccontextmanager

import pytest

from laminar_contrib.environments.trl_kind import TrlEnvironment, TrlTurns, open_trl
from laminar_contrib.tools.call_formats import CallFamily
from laminar_lab.tiny_models import tiny_model
from laminar_py.config.environment import ENVIRONMENTS
from laminar_py.config.registry import load_from_file
from laminar_py.config.section import ConfigError
from laminar_py.environment.protocol import End, Observation, Problem, Role
from laminar_py.records.trajectory import DropReason
from tests.environment.text_story import TextStory
from tests.environment.tools.conftest import turn
from tests.environment.turns import HOME

CLASSES = '''
from __future__ import annotations

import asyncio
import time


class Guess:
    """A game in the form that TRL's documentation has."""

    def __init__(self):
        self.wins = 0

    @property
    def public(self):
        raise RuntimeError("properties are no tools, and nobody asks them")

    def reset(self, number, **row) -> str | None:
        self.number, self.row, self.guesses, self.reward = int(number), row, [], 0.0
        return f"Guess below {row['most']}. " if "most" in row else None

    def guess(self, number: int, note: str = "") -> str:
        """
        Guess the number.

        Args:
            number: The number, which is
                at least 0.
            note: What you think.

        Returns:
            Larger, smaller or right.
        """
        if len(self.guesses) == 3:
            raise ValueError("Game over.")
        self.guesses.append(number)
        self.reward = 1.0 if number == self.number else 0.25
        return "right" if number == self.number else "larger" if number < self.number else "smaller"

    async def wait(self, seconds: float) -> int:
        """
        Wait a little.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return len(self.guesses)

    @staticmethod
    def double(number: int) -> int:
        """
        Twice a number.

        Args:
            number: The number.
        """
        return 2 * number

    def _private(self):
        pass

    def get_reward(self) -> float:
        return self.reward


class Child(Guess):
    """Inherits its tools."""

    deterministic = True

    async def get_reward(self):
        return len(self.guesses)


class Narrow:
    def reset(self, prompt, level):
        return f"{prompt} at level {level}"

    def tool(self, seconds: float) -> str:
        """Sleep.

        Args:
            seconds: How long.
        """
        self.said = "before"
        time.sleep(seconds)
        return self.said


class Sized:
    def __init__(self, most):
        self.most = most

    def reset(self, **row):
        return ["an image"]

    def look(self) -> int:
        """Look."""
        return self.most

    def get_reward(self):
        return "much"


class NoReset:
    def look(self) -> int:
        """Look."""
        return 1


class NoTool:
    def reset(self, **row):
        return None


class Untyped:
    def reset(self, **row):
        return None

    def look(self, where) -> int:
        """Look."""
        return 1


def function():
    return Guess()
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "games.py"
    path.write_text(CLASSES)
    return path


@pytest.fixture
def opened(file):
    @asynccontextmanager
    async def open_(name, **given):
        async with open_trl(TrlEnvironment(path=f"{file}:{name}", **given), HOME) as make:
            yield make

    return open_


PROBLEM = Problem(prompt="Which?", answer="7", fields={"number": 7, "most": 10})


async def test_a_game_is_played_with_its_tools_and_ends_with_its_reward(opened):
    async with opened("Guess") as make:
        game = make()
    assert game.reset(PROBLEM) == Observation("Guess below 10. ")
    assert game._game.row == {"prompt": "Which?", "answer": "7", "most": 10}
    assert await game.step(turn(("guess", {"number": 5}))) == Observation(("larger",), role=Role.TOOL)
    calls = turn(("guess", {"number": 9}), ("double", {"number": 4}), ("wait", {"seconds": 0.0}))
    assert (await game.step(calls)).messages == ("smaller", "8", "2")
    assert await game.step("I give up.") == End(0.25)
    assert game.reset(Problem(prompt="?", fields={"number": 7})) == Observation()


async def test_calls_of_a_turn_run_in_their_order_though_one_waits(opened):
    async with opened("Guess") as make:
        game = make()
    game.reset(PROBLEM)
    waits = [("wait", {"seconds": 0.1}), ("guess", {"number": 1}), ("wait", {"seconds": 0.0})]
    assert (await game.step(turn(*waits))).messages == ("0", "larger", "1")


async def test_what_a_method_raises_and_a_wrong_call_are_told_in_a_line(opened):
    async with opened("Guess", tools={"most_calls": 5}) as make:
        game = make()
    game.reset(PROBLEM)
    answer = await game.step(turn(*[("guess", {"number": 1})] * 4, ("reset", {"number": 1}), ("get_reward", {})))
    assert answer.messages == (
        *["larger"] * 3,
        "error: guess: ValueError: Game over.",
        "error: no tool is named 'reset'; there are double, guess, wait",
        "error: the calls after the first 5 were not run",
    )
    assert "valid integer" in (await game.step(turn(("guess", {"number": "x"})))).texts[0]


async def test_a_reward_may_be_async_and_tools_inherited(opened):
    async with opened("Child") as make:
        game = make()
    assert game.deterministic
    game.reset(PROBLEM)
    await game.step(turn(("guess", {"number": 7})))
    assert await game.step("done") == End(1.0)


async def test_reset_gets_the_fields_that_it_names_and_without_get_reward_other_terms_judge(opened):
    async with opened("Narrow") as make:
        narrow = make()
    problem = Problem(prompt="Go", answer="7", task="t", fields={"level": 3, "other": 4})
    assert narrow.reset(problem) == Observation("Go at level 3")
    assert await narrow.step("no call") == End(None)
    with pytest.raises(TypeError, match="level"):
        narrow.reset(Problem(prompt="Go"))


async def test_a_method_beyond_the_time_of_a_turn_ends_the_trajectory(opened, tmp_path):
    problem = Problem(prompt="Go", fields={"level": 3})
    async with opened("Narrow", timeout_s=0.3) as make:
        story, narrow = TextStory(make, problem, tmp_path, timeout_s=0.3), make()
        await story.say()
        assert (await story.say(turn(("tool", {"seconds": 0.0}))))[1] == "before"
        answer, _ = await story.say(turn(("tool", {"seconds": 2.0})))
    assert answer.failure is DropReason.ENVIRONMENT_TIMEOUT
    narrow.reset(problem)
    answer = await narrow.step(turn(("tool", {"seconds": 0.5})))
    assert answer.messages == ("before",), (
        "a call has no limit of its own, behind which the next would run beside it"
    )


@pytest.mark.parametrize(("name", "lost"), [("Child", False), ("Guess", True)])
async def test_one_that_says_that_it_is_deterministic_goes_on_in_another_process(opened, tmp_path, name, lost):
    async with opened(name) as make:
        story = TextStory(make, PROBLEM, tmp_path)
        await story.say()
        assert (await story.say(turn(("guess", {"number": 5}))))[1] == "larger"
        story.move()
        answer, text = await story.say(turn(("guess", {"number": 7}), ("wait", {"seconds": 0.0})))
    assert (answer.failure is DropReason.ENVIRONMENT_LOST) == lost
    assert text == (None if lost else "right2")


async def test_what_a_class_of_another_kind_returns_is_named(opened, tmp_path):
    async with opened("Sized", arguments={"most": 3}) as make:
        answer, _ = await TextStory(make, PROBLEM, tmp_path).say()
        assert "reset returned a list; return a text or None" in answer.detail
        with pytest.raises(ValueError, match="get_reward returned a str; return a number or None"):
            await make().step("no call")
        assert (await make().step(turn(("look", {})))).messages == ("3",)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoReset", "has no method reset; name a class as TRL's environment_factory takes it"),
        ("NoTool", "has no public method that is a tool; define one, or use the kind class"),
        ("Untyped", ", method look: argument where has no type; annotate it"),
        ("function", "is no class; name a class"),
        ("Nothing", "defines no function 'Nothing'"),
    ],
)
async def test_a_class_that_is_none_of_trls_is_refused_in_one_line(opened, file, name, words):
    with pytest.raises(ConfigError) as caught:
        async with opened(name):
            pass
    assert str(caught.value).startswith(f"environment.path={file}:{name}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_families_are_those_of_tools(opened):
    async with opened("Narrow", tools={"family": CallFamily.TAGS}) as make:
        narrow = make()
    narrow.reset(Problem(prompt="Go", fields={"level": 1}))
    assert (await narrow.step("<tool>0</tool>")).messages == ("<result>before</result>",)
    with pytest.raises(ConfigError, match=r"tools\.family=tags: look has no argument or several"):
        async with opened("Sized", tools={"family": CallFamily.TAGS}):
            pass


def test_the_chat_template_is_told_of_tools_unless_they_are_tags(file):
    read = ENVIRONMENTS.get("trl").settings.model_validate_json
    given = f'{{"kind": "trl", "path": "{file}:Guess", "tools": {{"family": "%s"}}}}'
    names = [tool["function"]["name"] for tool in read(given % "llama").definitions]
    assert names == ["double", "guess", "wait"]
    assert read(given % "tags").definitions == ()


@pytest.mark.slow
def test_trl_takes_the_same_class_and_tells_a_model_the_same_of_it(file, tmp_path, monkeypatch):
    """TRL's trainer finds the same tools, and transformers, which it asks, the same schemas."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from importlib.resources import files

    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import get_json_schema

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    for name, text in tiny_model(list("abc"), pattern=".").items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    template = (files("trl") / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = template
    guess = load_from_file(f"{file}:Guess", field="environment.path")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trl.GRPOTrainer(
            model=Qwen3ForCausalLM(Qwen3Config.from_pretrained(tmp_path / "model")),
            args=trl.GRPOConfig(output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, report_to=[]),
            train_dataset=datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}]),
            processing_class=tokenizer,
            environment_factory=guess,
        )
    theirs = [get_json_schema(tool)["function"] for tool in trainer._env_tools[None]]
    ours = [tool["function"] for tool in TrlEnvironment(path=f"{file}:Guess").definitions]
    assert [tool["name"] for tool in ours] == [tool["name"] for tool in theirs] == ["double", "guess", "wait"]
    for own, other in zip(ours, theirs, strict=True):
        assert own["description"] == other["description"]
        properties = own["parameters"]["properties"]
        assert {name: (one["type"], one["description"]) for name, one in properties.items()} == {
            name: (one["type"], one["description"]) for name, one in other["parameters"]["properties"].items()
        }
        assert own["parameters"]["required"] == other["parameters"]["required"]
    assert "Guess" in trainer.reward_func_names


def test_rewards_are_any_numbers(file):
    import numpy as np
    import torch

    class Game:
        def reset(self, **row): ...

    async def reward(value):
        game = Game()
        game.get_reward = lambda: value
        settings = TrlEnvironment(path=f"{file}:Guess")
        return await TrlTurns(game, {}, turns=None, settings=settings)._reward()

    values = [True, 2, np.float32(0.5), torch.tensor(0.25), None]
    assert [asyncio.run(reward(value)) for value in values] == [1.0, 2.0, 0.5, 0.25, None]
