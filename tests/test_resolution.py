"""Ours and SGLang resolve in one environment: pip's answer for the installation of docs/gpu.md, on any machine.

It needs a package index. One that has no metadata apart from wheels sends gigabytes; `make resolve` waits.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laminar_py.engines.sglang.launch import MIN_VERSION
from tests.runs.runs import REPO

LIMIT_S = float(os.environ.get("LAMINAR_RESOLVE_S", "120"))
EXTRAS = "sglang,wandb,lora,data"


def resolve(python: str, folder: Path, *what: str) -> subprocess.CompletedProcess[str]:
    """Ask pip what it would install for this version of Python; the answer is in `folder / "report.json"`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--only-binary=:all:", "--python-version", python, "--target", str(folder / "target")]
    command += ["--report", str(folder / "report.json"), *what]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_one_environment_resolves(python, tmp_path):
    report = tmp_path / "report.json"
    try:
        known = [sys.executable, "-m", "pip", "index", "versions", "sglang"]
        if subprocess.run(known, capture_output=True, timeout=LIMIT_S, check=False).returncode:
            pytest.skip("no package index with SGLang answers")
        answer = resolve(python, tmp_path, f"{REPO}[{EXTRAS}]")
    except subprocess.TimeoutExpired:
        pytest.skip(f"the index has not given all metadata within {LIMIT_S:g} s; `make resolve` waits longer")
    assert answer.returncode == 0, answer.stderr
    found = {
        item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(report.read_text())["install"]
    }
    assert tuple(map(int, found["sglang"].split("."))) >= MIN_VERSION
    release = found["nvidia-cuda-nvcc"].split(".")[:2]
    assert release == found["nvidia-cuda-runtime"].split(".")[:2], "a compiler of another version than its headers"
    page = (REPO / "docs/gpu.md").read_text()
    assert all(found[name] in page for name in ("torch", "transformers")), "docs/gpu.md has other versions"
