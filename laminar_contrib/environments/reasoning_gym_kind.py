"""The kind `reasoning_gym`: problems of a single turn, which the package's own scorers judge.

`reasoning_gym_data` writes the problems; each has the `entry` that its scorer needs. Every answer of a
model has a score, unless the problem itself is at fault (`tests/environment/test_reasoning_gym.py`).
"""

import importlib.util
import json
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pydantic import JsonValue

from laminar_contrib.environments.turns import ActionConfig, error_line
from laminar_py.config import ConfigError, EnvironmentHome, EnvironmentKind
from laminar_py.environment import End, Environment, Observation, Problem

NO_ANSWER = "gives no answer of its own, so nothing shows that a right one is worth more than a wrong one"
TUPLES = "compares tuples, which a data set in JSON does not keep, and so scores its own answer 0.05"
REFUSED = {
    "boxnet": NO_ANSWER,
    "graph_color": NO_ANSWER,
    "propositional_logic": NO_ANSWER,
    "rubiks_cube": NO_ANSWER,
    "rush_hour": NO_ANSWER,
    "game_of_life_halting": "gives 1 for any text where the answer is yes",
    "arc_agi": TUPLES,
    "rearc": TUPLES,
}
EVALUATING = {  # tasks whose scorer runs the answer of the model as Python, with all rights of its process
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}
FAULT_CHARS = 200
SCRIPT = "python -m laminar_contrib.environments.reasoning_gym_data"
ANSWER_TAGS = r"(?s)<answer>((?:(?!<answer>).)*?)</answer>"  # no scan passes the next opening tag
WHOLE_TURN = r"(?s)\A(.*)\Z"

log = logging.getLogger(__name__)


def require_package(field: str) -> None:
    """Raise a `ConfigError` that names the field, if reasoning-gym is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"{field}: reasoning-gym is not installed; pip install laminar-py[reasoning-gym]")


def make_task(name: str, config: Mapping[str, JsonValue], *, evaluates_answers: bool) -> Any:
    """Make a `ProceduralDataset` of reasoning-gym. Raises `ConfigError` if it is refused or cannot be made."""
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise _refusal(name, "no such task", "choose one of reasoning-gym's")
    if name in REFUSED:
        raise _refusal(name, REFUSED[name], "choose another")
    if name in EVALUATING and not evaluates_answers:
        fault = "its scorer runs the model's answer as Python code in the environments' own process"
        raise _refusal(name, fault, "choose another, or set evaluates_answers where such code can do no harm")
    try:
        return create_dataset(name, **config)
    except Exception as error:  # a task may raise anything at settings that it does not have
        raise _refusal(name, f"cannot be made with {dict(config)} ({error_line(error)})", "mend them") from error


def _refusal(name: str, fault: str, remedy: str) -> ConfigError:
    return ConfigError(f"reasoning-gym task {name}: {fault}; {remedy}")


class ReasoningGymEnvironment(ActionConfig):
    """Tasks of the package reasoning-gym: the first turn is the answer, and its score the reward.

    With a pattern, a turn without a match is worth 0. Default: the text in the last `<answer>` tags, or else the
    whole turn.
    """

    kind: str = "reasoning_gym"
    evaluates_answers: bool = False
    """True: allow tasks whose scorer runs the answer as Python code in this process, with all its rights."""


class TaskScorers:
    """Scorers of a process, each made once, e.g. `TaskScorers().score("4", entry, {})`."""

    def __init__(self, *, evaluates_answers: bool = False) -> None:
        self._evaluates_answers = evaluates_answers
        self._lock = threading.Lock()  # environments run in threads
        self._tasks: dict[str, Any] = {}  # by name and config
        self._faulty: set[str] = set()  # tasks whose scorer has raised

    def task(self, entry: Mapping[str, Any], config: Mapping[str, JsonValue]) -> Any:
        """Return the task of an entry. Raises `ConfigError` if the task is refused."""
        name = entry["metadata"]["source_dataset"]
        key = json.dumps([name, config], sort_keys=True)
        with self._lock:
            if key not in self._tasks:
                self._tasks[key] = make_task(name, config, evaluates_answers=self._evaluates_answers)
            return self._tasks[key]

    def score(self, answer: str, entry: Mapping[str, Any], config: Mapping[str, JsonValue]) -> float:
        """Score an answer; 0 if the scorer raises, which is logged once for each task."""
        task, name = self.task(entry, config), entry["metadata"]["source_dataset"]
        try:
            score = float(task.score_answer(answer, entry))
            if not math.isfinite(score):
                raise ValueError(f"it returned {score}")
        except Exception as error:  # noqa: BLE001 - a scorer may raise anything at a text that it does not expect
            if name not in self._faulty:
                self._faulty.add(name)
                fault = error_line(error)[:FAULT_CHARS]
                log.warning("the scorer of %s fails on some answers, which are worth 0: %s", name, fault)
            return 0.0
        return score


class ReasoningGymTurn:
    """Trajectory of one turn, for a problem that `reasoning_gym_data` wrote."""

    deterministic = True

    def __init__(self, scorers: TaskScorers, settings: ReasoningGymEnvironment) -> None:
        self._scorers = scorers
        self._settings = settings

    def reset(self, problem: Problem) -> Observation:
        """Add no message: the prompt is the question. Raises `ConfigError` if the task is refused."""
        entry: Any = problem.fields.get("entry")
        config: Any = problem.fields.get("config", {})
        metadata = entry.get("metadata") if isinstance(entry, dict) else None
        if not isinstance(metadata, dict) or "source_dataset" not in metadata or not isinstance(config, dict):
            raise ValueError(f"the problem has no `entry` of reasoning-gym; write problems with {SCRIPT}")
        self._entry, self._config = entry, config
        self._scorers.task(entry, config)
        return Observation()

    def step(self, action: str) -> End:
        """End with the score of the answer."""
        answer = self._settings.find_action(action, default=ANSWER_TAGS)
        if answer is None:
            answer = self._settings.find_action(action, default=WHOLE_TURN)
        return End(self._scorers.score(answer, self._entry, self._config) if answer else 0.0)


@asynccontextmanager
async def open_reasoning_gym(
    settings: ReasoningGymEnvironment, home: EnvironmentHome
) -> AsyncIterator[Callable[[], Environment]]:
    """Yield a function that makes environments, which share their scorers.

    Raises `ConfigError` without the package.
    """
    require_package("environment.kind=reasoning_gym")
    scorers = TaskScorers(evaluates_answers=settings.evaluates_answers)
    yield lambda: ReasoningGymTurn(scorers, settings)


REASONING_GYM = EnvironmentKind(settings=ReasoningGymEnvironment, open=open_reasoning_gym)
