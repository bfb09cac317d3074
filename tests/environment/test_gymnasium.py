"""The kind `gymnasium`, with the package's own games."""

import importlib.util
import sys
from contextlib import asynccontextmanager

import pytest

from laminar_contrib.environments.gymnasium_kind import GymnasiumEnvironment, open_gymnasium, with_color_tags
from laminar_contrib.environments.turns import format_observation
from laminar_py.config.environment import ENVIRONMENTS
from laminar_py.config.section import ConfigError
from laminar_py.environment.protocol import End, Observation, Problem
from tests.environment.text_story import TextStory
from tests.environment.turns import HOME

needs_gymnasium = pytest.mark.skipif(
    importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed"
)
LAKE = {
    "id": "FrozenLake-v1",
    "arguments": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
CARDS = {"id": "Blackjack-v1", "actions": ["stick", "hit"]}
TO_THE_GOAL = ["down", "down", "right", "right", "down", "right"]


@asynccontextmanager
async def opened(**given):
    async with open_gymnasium(GymnasiumEnvironment(**given), HOME) as make:
        yield make


async def begun(**given):
    """An environment, and the first that it says for seed 7."""
    async with opened(**given) as make:
        environment = make()
    return environment, environment.reset(Problem(prompt="", seed=7)).texts


@needs_gymnasium
async def test_a_lake_is_crossed_in_words_and_the_end_has_the_reward():
    environment, text = await begun(**LAKE)
    assert text == "<red>S</red>FFF\nFHFH\nFFFH\nHFFG"
    assert environment.step("I go right first") == Observation("  (Right)\nS<red>F</red>FF\nFHFH\nFFFH\nHFFG")
    assert environment.step("LEFT.") == Observation("  (Left)\n<red>S</red>FFF\nFHFH\nFFFH\nHFFG")
    *way, last = TO_THE_GOAL
    assert all(isinstance(environment.step(word), Observation) for word in way)
    assert environment.step(last) == End(1.0)


@needs_gymnasium
async def test_the_end_without_a_goal_is_worth_nothing_and_rewards_of_steps_are_added_up():
    environment, _ = await begun(**LAKE)
    environment.step("down")
    assert environment.step("right") == End(0.0)  # a hole
    cliff, _ = await begun(id="CliffWalking-v1", arguments={"max_episode_steps": 3})
    assert isinstance(cliff.step("0"), Observation)
    assert isinstance(cliff.step("0"), Observation)
    assert cliff.step("0") == End(-3.0), "truncated"


@needs_gymnasium
@pytest.mark.parametrize(
    ("said", "place"),
    [
        ("left or right? right", 1),
        ("<think>right</think> down", 4),
        ("down, not upright", 4),
        ("right <think>down", 1),
    ],
)
async def test_the_last_word_outside_of_reasoning_counts(said, place):
    environment, _ = await begun(**{**LAKE, "form": "at {}"})
    assert environment.step(said) == Observation(f"at {place}")


@needs_gymnasium
@pytest.mark.parametrize("said", ["", "forward", "<think>right</think>", "2", "brighten"])
async def test_a_turn_without_an_action_is_told_so_and_takes_no_step(said):
    environment, _ = await begun(**{**LAKE, "form": "at {}"})
    assert environment.step(said) == Observation("No action. Write one of left, down, right, up.")
    assert environment.step("down") == Observation("at 4")


@needs_gymnasium
async def test_a_pattern_says_where_the_action_stands():
    environment, _ = await begun(**{**LAKE, "form": "at {}", "pattern": "<go>(.*?)</go>"})
    assert environment.step("not left <go> Right </go>, up") == Observation("at 1")
    assert "No action" in environment.step("right").texts
    assert "No action" in environment.step("<go>there</go>").texts


@needs_gymnasium
async def test_numbers_are_actions_where_they_have_no_words():
    environment, text = await begun(id="FrozenLake-v1", arguments={"is_slippery": False})
    assert text.startswith("<red>S</red>FFF\n")
    assert environment.step("Step -1 is 2.") == Observation("  (Right)\nS<red>F</red>FF\nFHFH\nFFFH\nHFFG")
    assert environment.step("12") == Observation("No action. Write one of 0, 1, 2, 3.")


@needs_gymnasium
async def test_cards_have_no_rendering_so_the_observation_is_told():
    _, plain = await begun(**CARDS)
    _, formed = await begun(**CARDS, form="You have {}, the dealer shows {}, usable ace: {}.")
    have, shows, ace = plain.strip("[]").split(", ")
    assert formed == f"You have {have}, the dealer shows {shows}, usable ace: {ace}."
    environment, _ = await begun(**CARDS)
    assert environment.step("stick").reward in (-1.0, 0.0, 1.0, 1.5)


@needs_gymnasium
async def test_a_taxi_keeps_what_its_colors_say():
    import gymnasium

    known = {spec for spec in gymnasium.registry if spec.startswith("Taxi-")}
    _, text = await begun(id=max(known), actions=["south", "north", "east", "west", "pick", "drop"])
    assert "\x1b" not in text
    assert sorted(color for color in ("blue", "magenta", "yellow") if f"<{color}>" in text) == [
        "blue",
        "magenta",
        "yellow",
    ]


@needs_gymnasium
async def test_samples_of_a_group_begin_alike_and_a_field_goes_before_their_seed():
    async with opened(**CARDS) as make:
        first = [make().reset(Problem(prompt="", seed=seed)).texts for seed in range(12)]
        again = [make().reset(Problem(prompt="", seed=seed)).texts for seed in range(12)]
        fields = [make().reset(Problem(prompt="", seed=5, fields={"seed": seed})).texts for seed in range(12)]
        assert first == again == fields
        assert len(set(first)) > 6
        for seed in (-1, "4", True, 1.0):
            with pytest.raises(ValueError, match=f"seed={seed!r}: not an integer"):
                make().reset(Problem(prompt="", fields={"seed": seed}))


@needs_gymnasium
async def test_a_slippery_lake_goes_on_in_another_process_as_it_would_have(tmp_path):
    heard = {}
    async with opened(id="FrozenLake-v1", arguments={"map_name": "8x8"}) as make:
        for moves in (False, True):
            story = TextStory(make, Problem(prompt="", seed=11), tmp_path / str(moves))
            heard[moves] = [await story.say()]
            for word in "1212121212":
                if moves:
                    story.move()
                heard[moves].append(await story.say(word))
                assert heard[moves][-1][0].failure is None
    assert [text for _, text in heard[True]] == [text for _, text in heard[False]]
    assert len({text for _, text in heard[True]}) > 3


@needs_gymnasium
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"id": "FrozenLoch-v1"}, "environment.id=FrozenLoch-v1: cannot be made .*mend the id"),
        ({"id": "FrozenLake-v1", "arguments": {"depth": 3}}, "cannot be made .*depth"),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, "has 4 actions, and environment.actions 1 words"),
        ({"id": "Pendulum-v1"}, "has actions of Box.*choose one with Discrete"),
        ({"id": "Blackjack-v1", "form": "{} {} {} {}"}, "cannot begin .*mend environment.form"),
        (
            {"id": "FrozenLake-v1", "arguments": {"map_name": None}},
            "starts differently each time, with the same seed",
        ),
    ],
)
async def test_what_cannot_be_played_is_refused_in_one_line(given, words):
    with pytest.raises(ConfigError, match=words) as caught:
        async with opened(**given):
            pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pattern": "(left"}, "not a regular expression"),
        ({"pattern": "left"}, "has no group"),
        ({"actions": ["left", "Left "]}, "two are the same"),
        ({"actions": ["left", " "]}, "or one is empty"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_made(given, words):
    with pytest.raises(ValueError, match=words):
        ENVIRONMENTS.get("gymnasium").settings.model_validate({"kind": "gymnasium", "id": "x", **given})


async def test_without_the_package_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install laminar-py\[gymnasium\]"):
        async with opened(**LAKE):
            pass


def test_the_settings_are_read_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert GymnasiumEnvironment(**LAKE).kind == "gymnasium"


def test_forms_and_colors():
    import numpy as np

    assert format_observation("{} {}", (np.int64(3), np.array([1, 2]))) == "3 [1, 2]"
    assert format_observation("at {x}", {"x": np.float32(0.5)}) == "at 0.5"
    assert format_observation("at {}", np.int64(5)) == "at 5"
    assert (
        with_color_tags("\n a\x1b[34;1mR\x1b[0m\x1b[43m \x1b[0m\x1b[1mb\x1b[0m\n")
        == " a<blue>R</blue><yellow> </yellow>b"
    )
