"""The arrays against the rows that they are read from."""

import numpy as np

from laminar_lab.report.trajectories import FINISHES, REASONS, STATUSES, read_trajectories
from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import trajectory_rows
from laminar_py.records.trajectory import DropReason, Kind, Prompt, Status
from tests.ledger.runs import Issued, begin, issue, open_ledger
from tests.report.ledgers import write_small_run

VERSIONS = ("oldest_version", "newest_version", "version", "staleness")
PLAIN = ("number", "length", "epoch", "replica", "step", *VERSIONS)
VALUES = ("reward", "weight", "queue_s", "generate_s", "score_s")
TIMES = ("issued_s", "started_s", "finished_s", "scored_s", "ready_s", "ended_s")


async def test_every_column_is_that_of_the_rows(tmp_path):
    await write_small_run(tmp_path)
    with reading(tmp_path) as connection:
        found, rows = read_trajectories(connection), list(trajectory_rows(connection))
    assert len(found) == len(rows) == 12
    for name in PLAIN:
        expected = [-1 if getattr(row, name) is None else getattr(row, name) for row in rows]
        assert getattr(found, name).tolist() == expected, name
    for name in (*VALUES, *TIMES):
        values = np.array([getattr(row, name) for row in rows], np.float64)
        origin = found.origin_s if name in TIMES else 0.0
        np.testing.assert_allclose(getattr(found, name) + origin, values, rtol=1e-6, err_msg=name)
    assert [STATUSES[code] for code in found.status] == [row.status for row in rows]
    assert [REASONS[code] if code >= 0 else None for code in found.drop] == [row.drop_reason for row in rows]
    assert [FINISHES[code] if code >= 0 else None for code in found.finish] == [row.finish_reason for row in rows]
    assert found.group.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert min(found.issued_s) == 0.0
    assert len(found.where(found.dropped_for(DropReason.NO_SIGNAL))) == 2
    assert found.is_status(Status.CONSUMED).sum() == 4


async def test_kinds_are_told_apart_and_so_are_tasks(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        issue(ledger, "e0.0", kind=Kind.EVAL)
        for index, task in ((1, "algebra"), (2, "geometry"), (3, "algebra")):
            ledger.store_prompt(
                Prompt(
                    id=f"q{index}", index=index, text="?", ids=np.arange(3, dtype=np.int32), answer="4", task=task
                )
            )
            of = {"group_id": f"g{index}", "prompt_id": f"q{index}", "prompt_index": index, "sample_index": 0}
            ledger.append(Issued(trajectory_id=f"g{index}.0", kind=Kind.TRAIN, **of))
    with reading(tmp_path) as connection:
        all_trajectories = read_trajectories(connection)
    found, evaluations = (
        all_trajectories.where(all_trajectories.is_kind(kind)) for kind in (Kind.TRAIN, Kind.EVAL)
    )
    assert [found.tasks[code] for code in found.task] == ["algebra", "geometry", "algebra"]
    assert (found.number.tolist(), evaluations.number.tolist()) == ([2, 3, 4], [1])


async def test_an_empty_ledger_has_empty_columns(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
    with reading(tmp_path) as connection:
        assert len(read_trajectories(connection)) == 0
