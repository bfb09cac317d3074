"""Plants of experiments/silent patch names that exist: after a rename a patch would plant nothing, and say so."""

import ast
import importlib
import inspect
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from tests.experiments.folders import load_module

load_module(Path(__file__).parents[2] / "experiments/silent/further.py")
PLANTS = sys.modules.pop("plants").ALL  # `further` adds its own
OWN = {"loads", "mean", "mine"}  # what patches keep in a module


def patched(patch) -> set[tuple[str, ...]]:
    """Names that a patch reads or sets below its module, e.g. ("Weights", "copy_")."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(patch)))):
        names = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if names and isinstance(node, ast.Name) and node.id == "module" and names[0] not in OWN:
            found.add(tuple(names))
    return found


def has(module: ModuleType, names: tuple[str, ...]) -> bool:
    value = module
    for name in names:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


@pytest.mark.parametrize("name", PLANTS)
def test_what_a_plant_patches_is_there(name):
    modules = [importlib.import_module(one) for one in PLANTS[name].of]
    for names in patched(PLANTS[name].patch):
        assert any(has(module, names) for module in modules), names
