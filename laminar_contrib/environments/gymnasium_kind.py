"""The kind `gymnasium`: an environment of the package gymnasium with numbered actions, played in words.

A turn takes at most one step, and none if it has no action. Two trajectories with the same seed and actions get
the same observations; `open_gymnasium` tries that once.
"""

import importlib.util
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

from pydantic import JsonValue, model_validator

from laminar_py.config import ConfigError, EnvironmentConfig, EnvironmentHome, EnvironmentKind
from laminar_py.environment import (
    Answer,
    End,
    Environment,
    Observation,
    Problem,
    check_pattern,
    last_group,
    outside_reasoning,
)

COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
COLORED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)  # colored text with its escape sequences
TEXT = "ansi"  # gymnasium's word for a rendering in text


class GymnasiumEnvironment(EnvironmentConfig):
    """An environment of the package gymnasium; the reward is the sum of its steps' rewards."""

    kind: str = "gymnasium"
    id: str
    """Name that gymnasium knows it by, e.g. `FrozenLake-v1`, or `module:Name-v0` where a module registers it."""
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of `gymnasium.make`, e.g. `{is_slippery: false}`."""
    actions: list[str] | None = None
    """Words for the actions, in their order, e.g. `[left, down, right, up]`. Default: their numbers."""
    pattern: str | None = None
    """Regular expression whose first group is the action: its last match in a turn, outside of reasoning, counts.
    Default: the last word of `actions` in it. Capitals do not matter."""
    opens_reasoning: bool = False
    """True where the chat template itself writes the `<think>` that a turn begins in."""
    form: str | None = None
    """An observation as the model reads it, with `{}` or `{name}` for its parts, e.g. `You have {}, the dealer has
    {}.` Default: the rendering in text, or the observation as JSON where there is none."""
    marks: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Colored text of a rendering as the model reads it, by the color, e.g. `{red: "[{}]"}`. Default:
    `<red>{}</red>`, since the color alone may say where one is."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check the pattern, the actions and the marks. Raises `ConfigError`."""
        check_pattern(self.pattern)
        folded = [word.casefold().strip() for word in self.actions or ()]
        if self.actions is not None and (not all(folded) or len(set(folded)) < len(folded)):
            raise ConfigError(f"actions={', '.join(self.actions)}: two are the same, or one is empty; rename it")
        for color, mark in self.marks.items():
            if color not in COLORS:
                raise ConfigError(f"marks={color}: no such color; choose of {', '.join(COLORS)}")
            if mark.count("{}") != 1:
                raise ConfigError(f"marks.{color}={mark}: write {{}} once, where the text stands")
        return self


class GymnasiumTurns:
    """A trajectory in a gymnasium environment of its own."""

    def __init__(self, env: Any, *, settings: GymnasiumEnvironment) -> None:
        self._env = env
        self._settings = settings
        self._numbers = _numbers(env, settings)
        self._pattern = _pattern_of(settings.pattern, list(self._numbers))
        self._earned = 0.0
        self.deterministic = not env.spec.nondeterministic

    def reset(self, problem: Problem) -> Observation:
        """Begin with the problem's field `seed`, or with the seed of its group."""
        seed = problem.fields.get("seed", problem.seed)
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ValueError(f"seed={seed!r}: is no integer of at least 0; mend the problem, or leave it out")
        self._earned = 0.0
        observation, _ = self._env.reset(seed=seed)
        return Observation(self._text(observation))

    def step(self, action: str) -> Answer:
        """Take the action that a turn names, or tell the model which actions there are."""
        said = outside_reasoning(action, begun=self._settings.opens_reasoning)
        number = self._numbers.get((last_group(self._pattern, said) or "").casefold())
        if number is None:
            words = self._settings.actions or self._numbers
            return Observation(f"No action. Write one of {', '.join(words)}.")
        observation, reward, terminated, truncated, _ = self._env.step(number)
        self._earned += float(reward)
        return End(self._earned) if terminated or truncated else Observation(self._text(observation))

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _text(self, observation: object) -> str:
        if self._settings.form is not None:
            return written(self._settings.form, observation)
        if self._env.render_mode != TEXT:
            return json.dumps(_plain(observation))
        return marked(str(self._env.render()), self._settings.marks)


@asynccontextmanager
async def open_gymnasium(
    settings: GymnasiumEnvironment, home: EnvironmentHome
) -> AsyncIterator[Callable[[], Environment]]:
    """Yield a function that makes environments. Raises `ConfigError` if it cannot be played in words."""
    if importlib.util.find_spec("gymnasium") is None:
        raise ConfigError(
            "environment.kind=gymnasium: the package is not installed; pip install laminar-py[gymnasium]"
        )
    make = partial(_make, settings, _render_mode(settings))
    first, second = (_tried(make, settings) for _ in range(2))
    if first != second:
        raise _refused(settings, "begins otherwise each time, with the same seed", "fix what arguments leave open")
    yield lambda: GymnasiumTurns(make(), settings=settings)


def written(form: str, observation: object) -> str:
    """Write an observation by a format, e.g. `written("{} and {}", (14, 10))`; names are keys of a dictionary."""
    value = _plain(observation)
    if isinstance(value, dict):
        return form.format(**value)
    return form.format(*value) if isinstance(value, list) else form.format(value)


def marked(rendering: str, marks: dict[str, str]) -> str:
    """Replace the escape sequences of a rendering, e.g. by `<red>S</red>FF`, and strip empty lines at its ends."""

    def mark(match: re.Match[str]) -> str:
        colors = [int(code) for code in match[1].split(";") if re.fullmatch("[349][0-7]|10[0-7]", code)]
        if not colors:
            return match[2]
        color = COLORS[colors[-1] % 10]
        return marks.get(color, f"<{color}>{{}}</{color}>").replace("{}", match[2])

    return COLORED.sub(mark, rendering).strip("\n")


def _tried(make: Callable[[], Any], settings: GymnasiumEnvironment) -> str:
    """Return the first observation of an environment with seed 0, or none if it may differ between instances."""
    turns = GymnasiumTurns(make(), settings=settings)
    try:
        said = "".join(turns.reset(Problem(prompt="")).messages)
    except Exception as error:  # an environment of somebody else's, or a form that it does not have the parts of
        remedy = "mend environment.form, if there is one, or the environment"
        raise _refused(settings, f"cannot begin ({_line(error)})", remedy) from error
    finally:
        turns.close()
    return said if turns.deterministic else ""


def _make(settings: GymnasiumEnvironment, render_mode: str | None) -> Any:
    import gymnasium

    try:
        return gymnasium.make(settings.id, render_mode=render_mode, **settings.arguments)
    except Exception as error:  # an environment of somebody else's may raise anything
        raise _refused(settings, f"cannot be made ({_line(error)})", "mend the id or arguments") from error


def _render_mode(settings: GymnasiumEnvironment) -> str | None:
    """Return the text render mode, if the environment has it and the settings have no format."""
    env = _make(settings, None)
    try:
        modes = env.metadata.get("render_modes", ())
    finally:
        env.close()
    return TEXT if TEXT in modes and settings.form is None else None


def _numbers(env: Any, settings: GymnasiumEnvironment) -> dict[str, int]:
    """Map each word to the number of its action. Raises `ConfigError` if the actions are not numbered."""
    from gymnasium.spaces import Discrete

    space = env.action_space
    if not isinstance(space, Discrete):
        raise _refused(settings, f"has actions of {space}, not numbered ones", "choose one with Discrete actions")
    numbers = range(int(space.start), int(space.start) + int(space.n))
    words = list(map(str, numbers)) if settings.actions is None else settings.actions
    if len(words) != len(numbers):
        fault = f"has {len(numbers)} actions, and environment.actions {len(words)} words"
        raise _refused(settings, fault, "name each of them")
    return {word.casefold().strip(): number for word, number in zip(words, numbers, strict=True)}


def _pattern_of(pattern: str | None, words: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of an action: the one of the settings, or any of the words by itself."""
    longest_first = sorted(words, key=len, reverse=True)
    own = rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?!\w)"
    return re.compile(own if pattern is None else pattern, re.IGNORECASE)


def _plain(observation: object) -> Any:
    """Convert an observation to plain Python values."""
    if isinstance(observation, dict):
        return {str(name): _plain(part) for name, part in observation.items()}
    if isinstance(observation, tuple | list):
        return [_plain(part) for part in observation]
    tolist = getattr(observation, "tolist", None)  # of arrays and numbers of numpy
    return observation if tolist is None else tolist()


def _refused(settings: GymnasiumEnvironment, fault: str, remedy: str) -> ConfigError:
    return ConfigError(f"environment.id={settings.id}: {fault}; {remedy}")


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


GYMNASIUM = EnvironmentKind(settings=GymnasiumEnvironment, open=open_gymnasium)
