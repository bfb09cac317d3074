"""The benchmarks of segments in their smallest form: every figure comes and is positive."""

import pytest

from laminar_lab.bench.relay import namespaces
from laminar_lab.bench.segments import hosts, local
from laminar_py.config.section import ConfigError
from tests.bench.figures import figures


def test_every_figure_comes_once_and_is_positive():
    found = figures("segments", "local", local.rows(repeats=1, tokens=300, num_bytes=2**16))
    assert all(value > 0 for value in found.values())


def test_pieces_cross_from_host_to_host():
    try:
        namespaces.require(0)
    except ConfigError as error:
        pytest.skip(str(error))
    found = figures("segments", "hosts", hosts.rows(repeats=1, tokens=10, fetched=3))
    assert all(value > 0 for value in found.values())
