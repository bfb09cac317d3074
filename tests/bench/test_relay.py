"""The benchmark of the relay in its smallest form: every figure comes."""

from laminar_py.bench.catalog import ROWS, row_names
from laminar_py.bench.relay.measure import RelaySize, rows
from tests.bench.test_engines import TINY


def test_every_figure_comes_once_and_is_positive():
    parts, heard = list(ROWS["relay"]), []
    found = rows(parts, repeats=1, tell=heard.append, size=RelaySize(2**20, TINY))
    assert [row.name for row in found] == row_names(ROWS, "relay")
    assert all(row.value > 0 for row in found)
    assert heard
