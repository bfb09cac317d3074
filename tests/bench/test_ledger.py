"""The benchmark of the ledger in its smallest form: every figure comes, and those that no load changes hold."""

from laminar_py.bench.catalog import ROWS, row_names
from laminar_py.bench.ledger.measure import rows


def test_every_figure_comes_once():
    found = {row.name: row.value for row in rows(trajectories=6000, tell=lambda line: None)}
    assert list(found) == row_names(ROWS, "ledger")
    assert 1 < found["ledger_bytes"] < 5
    assert 0 < found["archive_bytes"] < 2
