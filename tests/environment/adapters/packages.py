"""Interpreters with the packages that adapters are tested against."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def python_of(name: str) -> Path:
    """Interpreter with a package, in `LAMINAR_ADAPTERS` or where `make test-adapters` has it; skips without."""
    named = os.environ.get("LAMINAR_ADAPTERS")
    python = (Path(named) if named else ROOT / ".venv-adapters") / name / "bin/python"
    if not python.is_file():
        assert not named, f"LAMINAR_ADAPTERS={named}: no file {python}"
        pytest.skip(f"no environment with {name}; `make test-adapters` makes one")
    return python
