"""Pieces fetched between two network namespaces, in the smallest form."""

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.relay import namespaces
from benchmarks.segments import hosts
from laminar_lab.bench.segments import PieceBatch
from laminar_py.config.section import ConfigError


@pytest.mark.slow
def test_pieces_cross_from_host_to_host():
    try:
        namespaces.require(0)
    except ConfigError as error:
        pytest.skip(str(error))
    rows = hosts.rows(repeats=1, tell=print, batch=PieceBatch(10, 3))
    assert [row.name for row in rows] == BENCHMARKS["segments"].measurements["hosts"].rows.split()
    assert all(row.value > 0 for row in rows)
