"""Heavy libraries that each kind of process imports, by the modules of a fresh one: imports are most of a start.

The test imports the process's module and each module of ours that it names, also within its functions. Ray is in
none: a process takes it only where a cluster is named.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROCESSES = "laminar_py.runtime.workers.processes."
HEAVY = {
    *("torch", "transformers", "peft", "ray", "aiohttp", "zmq", "numpy", "pyarrow", "tokenizers"),
    *("plotly", "pandas", "matplotlib", "openai", "datasets", "trl", "sympy", "mpmath", "prometheus_client"),
}
MAY_IMPORT = {  # module of a process: the heavy libraries it may have when its part has started
    "laminar_py.cli": set(),
    "laminar_py.cli.train": {"zmq", "numpy", "aiohttp", "tokenizers"},
    "laminar_py.runtime.orchestrator.controller": {"zmq", "numpy", "aiohttp", "tokenizers"},
    f"{PROCESSES}relay": {"zmq", "numpy"},
    f"{PROCESSES}scorer": {"numpy", "tokenizers"},
    f"{PROCESSES}environment": {"zmq", "numpy", "tokenizers"},
    f"{PROCESSES}replica": {"zmq", "numpy", "tokenizers"},  # the last at the first stop string; and its engine's
    f"{PROCESSES}services": {"aiohttp", "numpy"},
    "laminar_py.reward.calls.child": {"numpy"},
    "laminar_contrib.sandbox.inside.zygote": set(),
}


def is_for_types(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported_anywhere(module):
    """Modules of ours that a module imports, at its head or in a function, but for types alone."""
    path = ROOT / (module.replace(".", "/") + ".py")
    tree = ast.parse((path if path.exists() else path.with_suffix("") / "__init__.py").read_text())
    types = {node for given in ast.walk(tree) if is_for_types(given) for node in ast.walk(given)}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node not in types]
    named = [node.module for node in found if node.module]
    return sorted({module, *(name for name in named if name.startswith(("laminar_py.", "laminar_contrib.")))})


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_a_process_imports_no_heavy_library_that_it_does_not_need(module):
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    command = [sys.executable, "-c", code, *imported_anywhere(module)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert HEAVY & set(done.stdout.split()) <= MAY_IMPORT[module]
