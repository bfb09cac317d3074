"""Names that plants of experiments/silent patch are there: the patch of another name plants nothing, silently."""

import ast
import importlib
import inspect
import sys
import textwrap
from pathlib import Path

import pytest

from tests.experiments.folders import load_module

load_module(Path(__file__).parents[2] / "experiments/silent/further.py")
plants = sys.modules.pop("plants")  # which `further` adds to
# what these patches keep in the module themselves
OWN = {"one_replica_stays": {"mine"}, "a_sync_is_lost": {"loads"}, "mean_of_another_group": {"mean"}}


def patched(patch) -> set[str]:
    """Names that a patch, or a function that it gives the module, uses of it, e.g. "Weights.copy_"."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(patch)))):
        match node:
            case ast.Call(ast.Name(helper), [ast.Name("module"), *_]) if helper in patch.__globals__:
                found |= patched(patch.__globals__[helper])
            case ast.Attribute() if (name := ast.unparse(node)).startswith("module."):
                found.add(name.removeprefix("module."))
    return found


def assert_has(module, name):
    for part in name.split("."):
        assert hasattr(module, part), name
        module = getattr(module, part)


@pytest.mark.parametrize("name", plants.ALL)
def test_what_a_plant_patches_is_there(name):
    plant = plants.ALL[name]
    names = patched(plant.patch) - OWN.get(name, set()) - {"__name__"}
    assert bool(names) == bool(plant.of)
    for module in map(importlib.import_module, plant.of):
        for one in names:
            assert_has(module, one)


@pytest.mark.parametrize("module", plants.CHECKS)
def test_the_checks_whose_cost_is_measured_are_there(module):
    for name in plants.CHECKS[module]:
        assert_has(importlib.import_module(module), name)
