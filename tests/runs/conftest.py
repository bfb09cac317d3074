"""The shared memory of runs: a run that was stopped keeps its weights there, and a test leaves none."""

import pytest

from tests.runs.runs import forget_versions


@pytest.fixture(autouse=True)
def no_versions_left_behind(tmp_path):
    yield
    for ledger in tmp_path.rglob("ledger.sqlite"):
        forget_versions(ledger.parent)
