"""`laminar bench` finds benchmarks by name and takes settings; docs/performance.md has a line of each."""

import inspect
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from laminar_lab.bench import context, learner, prefixes, report
from laminar_lab.bench.report import Report
from laminar_lab.commands.bench import BENCHMARKS, measure
from laminar_py.cli import app
from laminar_py.config.section import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
FOLDER = Path(report.__file__).parent
MODULES = {name: import_module(f"laminar_lab.bench.{name}") for name in BENCHMARKS}


def test_a_row_is_printed_by_one_benchmark():
    counts = Counter(row for module in MODULES.values() for row in module.ROWS)
    assert [row for row, times in counts.items() if times > 1] == []


def test_the_page_says_where_each_row_is_printed():
    section = PAGE.read_text().partition("## Where each row is printed\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    told = {command.strip("`"): tuple(re.findall(r"`(\w+)`", rows)) for command, rows in lines}
    assert told == {f"laminar bench {name}": module.ROWS for name, module in MODULES.items()}


def test_every_module_with_rows_is_in_the_list():
    modules = {path for path in FOLDER.rglob("*.py") if re.search(r"^ROWS = ", path.read_text(), re.MULTILINE)}
    assert modules == {Path(module.__file__) for module in MODULES.values()}


def test_a_benchmark_needs_no_setting():
    for module in MODULES.values():
        assert all(one.default is not one.empty for one in inspect.signature(module.rows).parameters.values())


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="relays: no such benchmark; choose one of control, endpoint, "):
        measure("relays", [])
    with pytest.raises(ConfigError, match="seeds: no such setting here; choose model_bytes or num_bytes or"):
        measure("relay", ["seeds=2"])


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_a_setting_is_a_number_above_zero(text):
    with pytest.raises(ConfigError, match=f"repeats={text}: .*; give "):
        measure("relay", [f"repeats={text}"])


def test_a_command_with_json_prints_one_object_and_its_progress_elsewhere(monkeypatch):
    monkeypatch.setattr(learner, "_speed_rows", lambda model, repeats: [])
    monkeypatch.setattr(learner, "_mixture_rows", lambda model, repeats: [])
    monkeypatch.setattr(learner, "_offload_rows", lambda model, repeats: [])
    monkeypatch.setattr(prefixes, "rows", lambda **_: [])
    monkeypatch.setattr(context, "rows", lambda **_: [])
    done = CliRunner().invoke(app, ["bench", "learner", "sequences=64", "seeds=1", "--json"])
    assert done.exit_code == 0, done.output
    rows = msgspec.json.decode(done.stdout, type=Report).rows
    assert tuple(row.name for row in rows) == learner.ROWS[4:8]


def test_a_list_of_all_imports_no_heavy_library():
    code = "import sys, laminar_lab.commands.bench; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "transformers", "ray", "zmq", "aiohttp"} & set(done.stdout.split())
