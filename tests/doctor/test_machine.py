"""`laminar doctor` on the terminal, and the extras that remedies name."""

import re
import tomllib
from pathlib import Path

from typer.testing import CliRunner

from laminar_lab.doctor.checks import examine
from laminar_py.cli import app
from laminar_py.records.host import Finding

REPO = Path(__file__).parents[2]


def test_a_remedy_is_printed_with_its_brackets(monkeypatch):
    remedy = "pip install laminar-py[sglang]"
    monkeypatch.setattr(
        "laminar_lab.doctor.checks.examine", lambda: [Finding("x", "[a]", good=False, remedy=remedy)]
    )
    told = CliRunner().invoke(app, ["doctor"]).stdout
    assert remedy in told
    assert "[a]" in told


def test_findings_of_packages_are_among_the_rows():
    assert "sandbox" in [finding.subject for finding in examine()]


def test_every_extra_that_is_named_anywhere_can_be_installed():
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [REPO / "README.md", *(REPO / "docs").glob("*.md"), *REPO.glob("laminar_*/**/*.py")]
    named = {
        extra
        for file in files
        for found in re.findall(r"laminar-py\[([a-z,-]+)\]", file.read_text())
        for extra in found.split(",")
    }
    assert {"sglang", "lora"} <= named <= set(extras)
