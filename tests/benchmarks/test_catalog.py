"""Rows: each is printed by one command, which docs/performance.md names."""

import re
from collections import Counter
from pathlib import Path

import pytest

import benchmarks.catalog
import laminar_py.bench.catalog
from laminar_py.bench.catalog import choose, row_names
from laminar_py.config.section import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
COMMANDS = {"laminar bench": laminar_py.bench.catalog.ROWS, "python -m benchmarks": benchmarks.catalog.ROWS}


def test_a_row_is_printed_by_one_command():
    printed = [name for catalog in COMMANDS.values() for bench in catalog for name in row_names(catalog, bench)]
    assert [name for name, times in Counter(printed).items() if times > 1] == []


def test_the_page_says_where_each_row_is_printed():
    section = PAGE.read_text().partition("## Where each row is printed\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    told = {(command.strip("`"), part.strip("`")): re.findall(r"`(\w+)`", rows) for command, part, rows in lines}
    assert told == {
        (f"{command} {bench}", part): row_names(catalog, bench, part)
        for command, catalog in COMMANDS.items()
        for bench, parts in catalog.items()
        for part in parts
    }


def test_an_unknown_part_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="--only hops: no such part of relay; choose hop or publish or delta"):
        choose(laminar_py.bench.catalog.ROWS, "relay", "hops")
