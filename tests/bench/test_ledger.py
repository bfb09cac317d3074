"""The benchmark of the ledger in its smallest form: every figure comes, and those that no load changes hold."""

import pytest

from laminar_lab.bench.ledger.recording import rows
from tests.bench.figures import figures


@pytest.mark.slow
def test_every_figure_comes_once():
    found = figures("ledger", "recording", rows(trajectories=6000))
    assert 1 < found["ledger_bytes"] < 5
    assert 0 < found["archive_bytes"] < 2
