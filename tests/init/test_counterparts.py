"""The table of TRL's and verl's settings: our keys exist, and TRL's names and defaults are in its own classes."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from laminar_lab.init.counterparts import COUNTERPARTS, DEFAULTS, EPOCHS, MOST_CHANGED
from laminar_py.config import RunConfig
from laminar_py.config.loading import setting_names
from laminar_py.config.their_names import NAMES, WITHOUT, OtherTrainer, our_keys, their_names

LAUNCH = "num_processes"  # an argument of accelerate, which TRL's files may have
EARLIER = {"max_prompt_length", "warmup_ratio", "torch_dtype"}  # gone from TRL, and still in many files


def fields_of(package, *files):
    """Names and plain defaults of the fields of dataclasses, read from their source."""
    (root,) = find_spec(package).submodule_search_locations
    found = {}
    for file in files:
        for node in ast.walk(ast.parse((Path(root) / file).read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = default_of(node.value)
    return found


def default_of(value):
    """The default in `field(default=...)` or after the sign; None where it is none or computed."""
    if isinstance(value, ast.Call):
        value = next((given.value for given in value.keywords if given.arg == "default"), None)
    return value.value if isinstance(value, ast.Constant) else None


@pytest.fixture(scope="module")
def trl():
    own = ("base_config.py", "grpo_config.py", "model_config.py")
    return fields_of("transformers", "training_args.py") | fields_of(
        "trl", *(f"trainer/{file}" for file in own), "scripts/utils.py", "scripts/grpo.py"
    )


def names(trainer):
    return [name for key in NAMES for name in their_names(key, trainer)]


def test_every_name_of_trl_is_a_field_of_its_classes(trl):
    listed = {
        *names(OtherTrainer.TRL),
        *DEFAULTS[OtherTrainer.TRL],
        *WITHOUT[OtherTrainer.TRL],
        EPOCHS[OtherTrainer.TRL],
    }
    assert listed - {*trl, LAUNCH} == EARLIER


def test_the_defaults_of_trl_are_its_own(trl):
    computed = ("lr_scheduler_type",)  # an enum's member
    written = {name: value for name, value in DEFAULTS[OtherTrainer.TRL].items() if name not in computed}
    assert written == {name: trl[name] for name in written}


def test_every_row_is_a_setting_of_ours():
    assert NAMES.keys() - COUNTERPARTS.keys() == set()
    assert COUNTERPARTS.keys() - set(setting_names(RunConfig)) == set()
    assert len({row.meaning for row in COUNTERPARTS.values()}) == len(COUNTERPARTS) > MOST_CHANGED


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("learning_rate", [("learner.lr", "TRL's learning_rate")]),
        ("train_batch_size", [("rollout.prompts_per_step", "verl's train_batch_size")]),
        ("n", [("rollout.group_size", "verl's n")]),
        ("beta", [("algorithm.kl_coef", "TRL's beta")]),
        ("elephants", []),
    ],
)
def test_a_name_of_another_trainer_finds_our_setting(name, found):
    assert our_keys(name) == found
