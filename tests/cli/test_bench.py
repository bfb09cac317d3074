"""Benchmarks: one table makes the commands, and docs/performance.md says which prints a row."""

import re
import subprocess
import sys
from collections import Counter
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import resolve_name

import msgspec
import pytest
from typer.testing import CliRunner

import benchmarks.__main__ as laboratory
from laminar_lab.bench.catalog import Benchmark, Measurement
from laminar_lab.bench.report import Report, Row
from laminar_lab.commands.bench import BENCHMARKS
from laminar_py.cli import app
from laminar_py.config.section import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
COMMANDS = {"laminar bench": BENCHMARKS, "python -m benchmarks": laboratory.BENCHMARKS}
MEASUREMENTS = [
    pytest.param(benchmark, measurement, id=f"{command} {name} --only {only}")
    for command, catalog in COMMANDS.items()
    for name, benchmark in catalog.items()
    for only, measurement in benchmark.measurements.items()
]


def measured() -> list[Row]:
    return [Row("figure", 1.0, "x", "here")]


def refused() -> list[Row]:
    raise ConfigError("not on this machine")


def two(first: str, second: str) -> Benchmark:
    measurements = {name: Measurement(f"{__name__}:{name}", "figure") for name in (first, second)}
    return Benchmark(help="", example="", measurements=measurements)


def test_a_row_is_printed_by_one_command():
    printed = [
        name
        for catalog in COMMANDS.values()
        for benchmark in catalog.values()
        for measurement in benchmark.measurements.values()
        for name in measurement.rows.split()
    ]
    assert [name for name, times in Counter(printed).items() if times > 1] == []


def test_the_page_says_where_each_row_is_printed():
    section = PAGE.read_text().partition("## Where each row is printed\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    told = {(command.strip("`"), only.strip("`")): re.findall(r"`(\w+)`", rows) for command, only, rows in lines}
    assert told == {
        (f"{command} {name}", only): measurement.rows.split()
        for command, catalog in COMMANDS.items()
        for name, benchmark in catalog.items()
        for only, measurement in benchmark.measurements.items()
    }


@pytest.mark.parametrize(("benchmark", "measurement"), MEASUREMENTS)
def test_a_measurement_needs_no_option_that_its_command_has_not(benchmark, measurement):
    given = {option.name for option in benchmark.options} | {"tell"}
    parameters = signature(resolve_name(measurement.function)).parameters.values()
    assert {one.name for one in parameters if one.default is Parameter.empty} <= given


@pytest.mark.parametrize(("command", "catalog"), COMMANDS.items())
def test_each_option_of_a_command_reaches_a_measurement(command, catalog):
    for benchmark in catalog.values():
        functions = [resolve_name(measurement.function) for measurement in benchmark.measurements.values()]
        named = {name for function in functions for name in signature(function).parameters}
        assert {option.name for option in benchmark.options} <= named, command


def test_an_unknown_measurement_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="--only hops: no such measurement; choose hop or publish or delta"):
        BENCHMARKS["relay"].measure("hops", tell=print)


@pytest.mark.parametrize("order", [("measured", "refused"), ("refused", "measured")])
def test_what_cannot_be_measured_here_is_left_out_where_another_can(order):
    heard = []
    assert two(*order).measure(None, tell=heard.append) == measured()
    assert "refused is left out: not on this machine" in heard


def test_what_cannot_be_measured_here_is_refused_where_it_is_all_that_is_asked_for():
    with pytest.raises(ConfigError, match="not on this machine"):
        two("measured", "refused").measure("refused", tell=print)


def test_a_command_with_json_prints_one_object_and_its_progress_elsewhere():
    done = CliRunner().invoke(app, ["bench", "repack", "--only", "plan", "--json"])
    assert done.exit_code == 0, done.output
    assert [row.name for row in msgspec.json.decode(done.stdout, type=Report).rows] == ["plan_256x8192_ms"]
    assert done.stderr == "plan\n"


def test_making_commands_imports_no_heavy_library():
    code = "import sys, benchmarks.__main__, laminar_py.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "transformers", "ray", "zmq", "aiohttp"} & set(done.stdout.split())
