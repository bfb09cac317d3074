"""Tasks of the package reasoning-gym as this project can use them: made by name, or refused with the reason.

Called by the kind `reasoning_gym` and by the script that writes its problems. Found with version 0.1.25.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from laminar_py.config import ConfigError

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
EVALUATING = (
    frozenset(  # tasks whose scorer runs the answer of the model as Python, with all rights of its process
        {
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
    )
)


def require_package(field: str) -> None:
    """Raises `ConfigError`, which names the field, where reasoning-gym is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"{field}: reasoning-gym is not installed; pip install laminar-py[reasoning-gym]")


def make_task(name: str, config: Mapping[str, JsonValue], *, evaluates_answers: bool) -> Any:
    """A `ProceduralDataset` of reasoning-gym. Raises `ConfigError` for one that is refused or cannot be made."""
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise _refused(name, "no such task", "choose one of reasoning-gym's")
    if name in REFUSED:
        raise _refused(name, REFUSED[name], "choose another")
    if name in EVALUATING and not evaluates_answers:
        fault = "its scorer runs the model's answer as Python code in the environments' own process"
        raise _refused(name, fault, "choose another, or set evaluates_answers where such code can do no harm")
    try:
        return create_dataset(name, **config)
    except Exception as error:  # a task may raise anything at settings that it does not have
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise _refused(name, f"cannot be made with {dict(config)} ({line})", "mend them") from error


def _refused(name: str, fault: str, remedy: str) -> ConfigError:
    return ConfigError(f"reasoning-gym task {name}: {fault}; {remedy}")
