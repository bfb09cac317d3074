"""`laminar doctor` on the terminal, and the extras that remedies name."""

import platform
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laminar_contrib.sandbox.inside.seccomp import BY_MACHINE
from laminar_contrib.sandbox.records import SandboxTier
from laminar_lab.doctor.checks import examine
from laminar_py.cli import app
from laminar_py.records.host import Finding
from tests.sandbox.machines import laminar_without_sandbox

REPO = Path(__file__).parents[2]


def test_a_remedy_is_printed_with_its_brackets(monkeypatch):
    remedy = "pip install laminar-py[sglang]"
    monkeypatch.setattr(
        "laminar_lab.doctor.checks.examine", lambda: [Finding("x", "[a]", good=False, remedy=remedy)]
    )
    told = CliRunner().invoke(app, ["doctor"]).stdout
    assert remedy in told
    assert "[a]" in told


def test_the_strongest_sandbox_that_can_be_had_is_named():
    (found,) = [finding for finding in examine() if finding.subject == "sandbox"]
    tier = SandboxTier(found.state.partition(" ")[0])
    assert found.good is (tier is not SandboxTier.NONE)
    assert bool(found.remedy) is not found.good


@pytest.mark.skipif(platform.machine() not in BY_MACHINE, reason="the kernel's calls are not known")
def test_a_machine_without_a_sandbox_is_told_why_and_what_to_do():
    told = laminar_without_sandbox("doctor").stdout
    words = " ".join(re.sub("[│┃]", " ", told).split())
    assert "sandbox none (namespaces:" in words
    assert "unshare:" in words
    assert "run as root" in words


def test_every_extra_that_is_named_anywhere_can_be_installed():
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [REPO / "README.md", *(REPO / "docs").glob("*.md"), *REPO.glob("laminar_*/**/*.py")]
    named = {
        extra
        for file in files
        for found in re.findall(r"laminar-py\[([a-z,-]+)\]", file.read_text())
        for extra in found.split(",")
    }
    assert {"sglang", "flash-attn", "lora"} <= named <= set(extras)
