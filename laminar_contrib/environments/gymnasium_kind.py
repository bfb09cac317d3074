"""The kind `gymnasium`: an environment of the package gymnasium with numbered actions, played in words.

A turn takes at most one step, and none if it has no action. Two trajectories with the same seed and actions get
the same observations; `open_gymnasium` tries that once.
"""

import importlib.util
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

from pydantic import JsonValue, model_validator

from laminar_contrib.environments.turns import ActionConfig, error_line, format_observation, to_plain
from laminar_py.config import ConfigError, EnvironmentHome, EnvironmentKind
from laminar_py.environment import Answer, End, Environment, Observation, Problem

COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
COLORED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)  # colored text with its escape sequences
TEXT = "ansi"  # gymnasium's word for a rendering in text


class GymnasiumEnvironment(ActionConfig):
    """An environment of the package gymnasium; the reward is the sum of its steps' rewards.

    Without a pattern, the last word of `actions` in a turn is the action.
    """

    kind: str = "gymnasium"
    id: str
    """Name that gymnasium knows it by, e.g. `FrozenLake-v1`, or `module:Name-v0` where a module registers it."""
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of `gymnasium.make`, e.g. `{is_slippery: false}`."""
    actions: list[str] | None = None
    """Words for the actions, in their order, e.g. `[left, down, right, up]`. Default: their numbers."""
    form: str | None = None
    """An observation as the model reads it, with `{}` or `{name}` for its parts, e.g. `You have {}, the dealer has
    {}.` Default: the rendering in text, or the observation as JSON where there is none."""

    @model_validator(mode="after")
    def _check_actions(self) -> Self:
        words = [word.casefold().strip() for word in self.actions or ()]
        if self.actions is not None and (not all(words) or len(set(words)) < len(words)):
            raise ConfigError(f"actions={', '.join(self.actions)}: two are the same, or one is empty; rename it")
        return self


class GymnasiumTurns:
    """A trajectory in a gymnasium environment of its own."""

    def __init__(self, env: Any, settings: GymnasiumEnvironment) -> None:
        self._env = env
        self._settings = settings
        self._numbers = _action_numbers(env, settings)
        longest_first = "|".join(map(re.escape, sorted(self._numbers, key=len, reverse=True)))
        self._any_action = rf"(?<![\w-])({longest_first})(?!\w)"
        self._return = 0.0
        self.deterministic = not env.spec.nondeterministic

    def reset(self, problem: Problem) -> Observation:
        """Begin with the problem's field `seed`, or with the seed of its group."""
        seed = problem.fields.get("seed", problem.seed)
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ValueError(
                f"seed={seed!r}: not an integer of at least 0; correct the problem's field seed, or remove it"
            )
        self._return = 0.0
        observation, _ = self._env.reset(seed=seed)
        return Observation(self._text(observation))

    def step(self, action: str) -> Answer:
        """Take the action that a turn names. If it names none, take no step and list the actions for the model."""
        word = self._settings.find_action(action, default=self._any_action)
        number = self._numbers.get((word or "").casefold())
        if number is None:
            words = self._settings.actions or self._numbers
            return Observation(f"No action. Write one of {', '.join(words)}.")
        observation, reward, terminated, truncated, _ = self._env.step(number)
        self._return += float(reward)
        return End(self._return) if terminated or truncated else Observation(self._text(observation))

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _text(self, observation: object) -> str:
        if self._settings.form is not None:
            return format_observation(self._settings.form, observation)
        if self._env.render_mode != TEXT:
            return json.dumps(to_plain(observation))
        return with_color_tags(str(self._env.render()))


@asynccontextmanager
async def open_gymnasium(
    settings: GymnasiumEnvironment, home: EnvironmentHome
) -> AsyncIterator[Callable[[], Environment]]:
    """Yield a function that makes environments. Raises `ConfigError` for an unusable environment."""
    if importlib.util.find_spec("gymnasium") is None:
        raise ConfigError(
            "environment.kind=gymnasium: the package is not installed; pip install laminar-py[gymnasium]"
        )
    probe = _make(settings, None)
    has_text = TEXT in probe.metadata.get("render_modes", ()) and settings.form is None
    probe.close()
    make = partial(_make, settings, TEXT if has_text else None)
    first, second = (_first_text(make, settings) for _ in range(2))
    if first != second:
        raise _refusal(settings, "starts differently each time, with the same seed", "fix its random arguments")
    yield lambda: GymnasiumTurns(make(), settings)


def with_color_tags(rendering: str) -> str:
    """Replace the escape sequences of a rendering by tags, e.g. `<red>S</red>FF`, and strip empty outer lines."""

    def tag(match: re.Match[str]) -> str:
        colors = [int(code) for code in match[1].split(";") if re.fullmatch("[349][0-7]|10[0-7]", code)]
        color = COLORS[colors[-1] % 10] if colors else ""
        return f"<{color}>{match[2]}</{color}>" if color else match[2]

    return COLORED.sub(tag, rendering).strip("\n")


def _first_text(make: Callable[[], Any], settings: GymnasiumEnvironment) -> str:
    """Return the first text of an environment with seed 0, or "" if it may differ between instances."""
    turns = GymnasiumTurns(make(), settings)
    try:
        text = "".join(turns.reset(Problem(prompt="")).messages)
    except Exception as error:  # an environment of somebody else's, or a form that it does not have the parts of
        remedy = "mend environment.form, if there is one, or the environment"
        raise _refusal(settings, f"cannot begin ({error_line(error)})", remedy) from error
    finally:
        turns.close()
    return text if turns.deterministic else ""


def _make(settings: GymnasiumEnvironment, render_mode: str | None) -> Any:
    import gymnasium

    try:
        return gymnasium.make(settings.id, render_mode=render_mode, **settings.arguments)
    except Exception as error:  # an environment of somebody else's may raise anything
        raise _refusal(settings, f"cannot be made ({error_line(error)})", "mend the id or arguments") from error


def _action_numbers(env: Any, settings: GymnasiumEnvironment) -> dict[str, int]:
    """Map each word to the number of its action. Raises `ConfigError` if the actions are not numbered."""
    from gymnasium.spaces import Discrete

    space = env.action_space
    if not isinstance(space, Discrete):
        raise _refusal(settings, f"has actions of {space}, not numbered ones", "choose one with Discrete actions")
    numbers = range(int(space.start), int(space.start) + int(space.n))
    words = list(map(str, numbers)) if settings.actions is None else settings.actions
    if len(words) != len(numbers):
        fault = f"has {len(numbers)} actions, and environment.actions {len(words)} words"
        raise _refusal(settings, fault, "name each of them")
    return {word.casefold().strip(): number for word, number in zip(words, numbers, strict=True)}


def _refusal(settings: GymnasiumEnvironment, fault: str, remedy: str) -> ConfigError:
    return ConfigError(f"environment.id={settings.id}: {fault}; {remedy}")


GYMNASIUM = EnvironmentKind(settings=GymnasiumEnvironment, open=open_gymnasium)
