"""Measurements are found by their modules and take settings by name; docs/performance.md has a line of each."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from laminar_lab.bench import registry
from laminar_lab.bench.registry import Measurement, find, measure
from laminar_lab.bench.report import Report, Row
from laminar_py.cli import app
from laminar_py.config.section import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
FOLDER = Path(registry.__file__).parent
FIGURE = Row("figure", 1.0, "x", "here")


class Fake(Measurement):
    """Measures at once, or refuses."""

    def settings(self):
        return {}

    def measure(self, given):
        if self.name == "refused":
            raise ConfigError("not on this machine")
        return [FIGURE]


def fake(*names):
    return [Fake("fake", name, "") for name in names]


def test_a_row_is_printed_by_one_measurement():
    assert [name for name, times in Counter(n for one in find() for n in one.row_names).items() if times > 1] == []


def test_the_page_says_where_each_row_is_printed():
    section = PAGE.read_text().partition("## Where each row is printed\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    told = {
        (command.strip("`"), only.strip("`")): tuple(re.findall(r"`(\w+)`", rows)) for command, only, rows in lines
    }
    assert told == {(f"laminar bench {one.benchmark}", one.name): one.row_names for one in find()}


def test_every_module_with_rows_is_in_the_list():
    modules = {path for path in FOLDER.rglob("*.py") if re.search(r"^ROWS = ", path.read_text(), re.MULTILINE)}
    assert modules == {Path(one.module.__file__) for one in find()}


@pytest.mark.parametrize("one", find(), ids=lambda one: f"{one.benchmark}-{one.name}")
def test_a_measurement_needs_no_setting_and_says_what_it_measures(one):
    assert all(setting.default is not setting.empty for setting in one.settings().values())
    assert one.about


def test_what_there_is_not_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match="--only hops: no such measurement; choose hop"):
        find("relay", "hops")
    with pytest.raises(ConfigError, match="relays: no such benchmark; choose one of control, endpoint, "):
        find("relays")
    with pytest.raises(ConfigError, match="seeds: no such setting here; choose num_bytes or repeats or shm"):
        measure(find("relay", "hop"), ["seeds=2"])


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_a_setting_is_a_number_above_zero(text):
    with pytest.raises(ConfigError, match=f"repeats={text}: .*; give "):
        measure(find("relay", "hop"), [f"repeats={text}"])


@pytest.mark.parametrize("order", [("measured", "refused"), ("refused", "measured")])
def test_what_cannot_be_measured_here_is_left_out_where_another_can(order, capsys):
    assert measure(fake(*order), []) == [FIGURE]
    assert "refused is left out: not on this machine" in capsys.readouterr().err


def test_what_cannot_be_measured_here_is_refused_where_it_is_all_that_is_asked_for():
    with pytest.raises(ConfigError, match="not on this machine"):
        measure(fake("refused"), [])


def test_a_command_with_json_prints_one_object_and_its_progress_elsewhere():
    done = CliRunner().invoke(app, ["bench", "packer", "sequences=64", "seeds=1", "--json"])
    assert done.exit_code == 0, done.output
    rows = msgspec.json.decode(done.stdout, type=Report).rows
    assert tuple(row.name for row in rows) == find("packer")[0].row_names
    assert done.stderr == "packer\n"


def test_a_list_of_all_imports_no_heavy_library():
    code = "import sys, laminar_lab.commands.bench as command; command.find(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "transformers", "ray", "zmq", "aiohttp"} & set(done.stdout.split())
