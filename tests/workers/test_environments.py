"""Processes of environments: deaths of theirs that the run counts."""

import pytest

from laminar_py.environment.calls import ProcessSpentError
from laminar_py.records.events import PartCrashed
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.workers.environments import EnvironmentKeeper
from tests.workers.test_keeper import Life, kept


@pytest.mark.parametrize(
    ("reason", "counts"), [(f"{ProcessSpentError.__name__}: it has 9 bytes", False), ("killed", True)]
)
async def test_a_process_that_ends_itself_at_its_limits_is_replaced_and_no_death_of_the_run(
    monkeypatch, reason, counts
):
    life = Life(monkeypatch)
    life.clean_up = EnvironmentKeeper.clean_up.__get__(life)

    async def watch(parts):
        life.served.put_nowait(parts)
        raise PartCrashedError("part-0", reason)

    life.watch = watch
    async with kept(life):
        for _ in range(3):
            await life.served.get()
        assert any(isinstance(event, PartCrashed) for event in life.events) == counts
