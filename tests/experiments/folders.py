"""Modules and data scripts of experiments, whose names occur in several folders."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def load_module(path: Path) -> ModuleType:
    """The module of a file, named by both, e.g. `countdown_task`; it finds its neighbours by their own names."""
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def make_data(script: Path, out: Path, *options: str) -> str:
    """Run a script that makes data in `out`, and return what it says."""
    command = [sys.executable, str(script), "--out", str(out), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def rows(path: Path) -> list[dict[str, object]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
